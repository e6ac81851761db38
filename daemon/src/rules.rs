//! Which connections may have lanes: rules that an administrator has added to the running daemon (`underpass deny`), then those of
//! the configuration. The first that is about an end decides; an end that none is about may have a lane. Both ends need to.

use crate::nodes::peers::directory::{Range, RangeError};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use underpass_admin::rules::{Action, Rule};
use underpass_pods::files::put_text;

/// Most rules that are added: each is tried for each connection.
const MOST: usize = 256;
/// The added rules, in the runtime directory: they outlive the daemon, and not the node's next boot.
pub const FILE: &str = "rules.json";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("rule `{0}`: `{1}` is no address range: {2}")]
    Range(Box<Rule>, String, RangeError),
    #[error("there are {MOST} rules already")]
    Full,
    #[error("there is no rule {0}; `underpass rules` shows them")]
    None(usize),
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
}

/// A rule whose addresses are read.
#[derive(Clone, Debug)]
struct Checked {
    rule: Rule,
    addresses: Vec<Range>,
}

/// An end of a connection, as rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub program: &'a str,
    pub uid: u32,
    /// Its own and the other end's.
    pub addresses: [SocketAddr; 2],
    /// Of its pod.
    pub namespace: Option<&'a str>,
}

/// All rules.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    added: Vec<Checked>,
    configured: Vec<Checked>,
    /// Where the added ones are kept.
    file: Option<PathBuf>,
}

impl Checked {
    fn new(rule: Rule) -> Result<Checked, Error> {
        let range = |text: &String| match text.parse() {
            Ok(r) => Ok(r),
            Err(why) => Err(Error::Range(rule.clone().into(), text.clone(), why)),
        };
        let addresses = rule.addresses.iter().map(range).collect::<Result<_, _>>()?;
        Ok(Checked { rule, addresses })
    }

    fn is_about(&self, s: &Subject<'_>) -> bool {
        fn any<T>(of: &[T], is: impl FnMut(&T) -> bool) -> bool {
            of.is_empty() || of.iter().any(is)
        }
        let r = &self.rule;
        any(&r.programs, |p| p == s.program)
            && any(&r.uids, |u| *u == s.uid)
            && any(&r.ports, |p| s.addresses.iter().any(|a| a.port() == *p))
            && any(&r.namespaces, |n| Some(n.as_str()) == s.namespace)
            && any(&self.addresses, |r| {
                s.addresses.iter().any(|a| r.contains(a.ip()))
            })
    }
}

/// Are these rules that can be followed?
pub fn check(rules: &[Rule]) -> Result<(), Error> {
    rules
        .iter()
        .try_for_each(|r| Checked::new(r.clone()).map(drop))
}

impl Rules {
    /// Those of a configuration, which has been checked; one that has not denies everything.
    pub fn configured(rules: &[Rule]) -> Rules {
        let mut all = Rules::default();
        all.configure(rules);
        all
    }

    /// Another configuration.
    pub fn configure(&mut self, rules: &[Rule]) {
        self.configured = rules.iter().map(|r| checked(r.clone())).collect();
    }

    /// From now on the added rules are kept in `dir`. If those that are there cannot be read, everything is denied until an
    /// administrator takes that rule away.
    pub fn keep_in(&mut self, dir: &Path) {
        let file = dir.join(FILE);
        let read = std::fs::read(&file).and_then(|text| Ok(serde_json::from_slice(&text)?));
        let rules: Vec<Rule> = match read {
            Ok(rules) => rules,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => {
                tracing::error!(
                    "{}: {e}; no connection gets a lane until `underpass rules --delete 1`",
                    file.display()
                );
                vec![Rule::default()]
            }
        };
        self.added = rules.into_iter().map(checked).collect();
        self.file = Some(file);
    }

    /// Puts a rule before all others.
    pub fn add(&mut self, rule: Rule) -> Result<(), Error> {
        if self.added.len() >= MOST {
            return Err(Error::Full);
        }
        let mut added = self.added.clone();
        added.insert(0, Checked::new(rule)?);
        self.store(added)
    }

    /// Takes an added rule away; they count from 1.
    pub fn delete(&mut self, number: usize) -> Result<(), Error> {
        let mut added = self.added.clone();
        let at = number.checked_sub(1).filter(|n| *n < added.len());
        added.remove(at.ok_or(Error::None(number))?);
        self.store(added)
    }

    fn store(&mut self, added: Vec<Checked>) -> Result<(), Error> {
        if let Some(file) = &self.file {
            write(file, &added).map_err(|e| Error::File(file.clone(), e))?;
        }
        self.added = added;
        Ok(())
    }

    /// Does a rule keep this end on TCP?
    pub fn deny(&self, end: &Subject<'_>) -> bool {
        let mut all = self.added.iter().chain(&self.configured);
        let first = all.find(|r| r.is_about(end));
        first.is_some_and(|r| r.rule.action == Action::Deny)
    }

    /// Does a rule ask for namespaces, which take a look to know?
    pub fn ask_namespaces(&self) -> bool {
        let mut all = self.added.iter().chain(&self.configured);
        all.any(|r| !r.rule.namespaces.is_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.configured.is_empty()
    }

    /// Added ones, and those of the configuration, each in their order.
    pub fn shown(&self) -> [Vec<Rule>; 2] {
        [&self.added, &self.configured].map(|all| all.iter().map(|r| r.rule.clone()).collect())
    }
}

/// What cannot be followed denies everything.
fn checked(rule: Rule) -> Checked {
    Checked::new(rule).unwrap_or_else(|e| {
        tracing::error!("{e}; it counts as `{}`", Rule::default());
        Checked {
            rule: Rule::default(),
            addresses: Vec::new(),
        }
    })
}

fn write(file: &Path, all: &[Checked]) -> io::Result<()> {
    let rules: Vec<&Rule> = all.iter().map(|r| &r.rule).collect();
    put_text(file, &serde_json::to_vec(&rules)?, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        serde_json::from_str(text).unwrap()
    }

    fn end<'a>(program: &'a str, uid: u32, ends: [&str; 2]) -> Subject<'a> {
        Subject {
            program,
            uid,
            addresses: ends.map(|a| a.parse().unwrap()),
            namespace: None,
        }
    }

    #[test]
    fn the_first_that_is_about_it_decides() {
        let redis = end("redis-server", 7, ["10.0.0.1:6379", "10.1.0.2:40000"]);
        let mut all = Rules::default();
        assert!(!all.deny(&redis), "nothing is denied");
        all.configure(&[
            rule(r#"{"action": "allow", "uids": [7], "ports": [6379]}"#),
            rule("{}"),
        ]);
        assert!(!all.deny(&redis));
        assert!(all.deny(&end("x", 7, ["10.0.0.1:80", "10.1.0.2:40000"])));
        assert!(all.deny(&end("x", 8, ["10.0.0.1:6379", "10.1.0.2:40000"])));
        all.add(rule(r#"{"addresses": ["10.1.0.0/16"]}"#)).unwrap();
        assert!(all.deny(&redis), "what is added comes first");
        assert!(!all.deny(&end("x", 7, ["10.2.0.1:6379", "[::1]:5"])));
        assert!(all.deny(&end("x", 7, ["10.2.0.1:6379", "[::ffff:10.1.9.9]:5"])));
        all.delete(1).unwrap();
        assert!(!all.deny(&redis));
        assert_eq!(
            all.delete(1).unwrap_err().to_string(),
            "there is no rule 1; `underpass rules` shows them"
        );
        assert!(all.delete(0).is_err());
        let wrong = all
            .add(rule(r#"{"addresses": ["10.1.0.1/16"]}"#))
            .unwrap_err();
        assert!(
            wrong.to_string().contains("did you mean 10.1.0.0/16?"),
            "{wrong}"
        );
        assert!(all.shown()[0].is_empty());
    }

    #[test]
    fn namespaces_are_those_of_pods() {
        let mut all = Rules::default();
        assert!(!all.ask_namespaces());
        all.add(rule(r#"{"namespaces": ["shop", "bank"]}"#))
            .unwrap();
        assert!(all.ask_namespaces());
        let mut s = end("x", 0, ["10.0.0.1:1", "10.0.0.2:2"]);
        assert!(!all.deny(&s), "no pod");
        s.namespace = Some("bank");
        assert!(all.deny(&s));
        s.namespace = Some("ban");
        assert!(!all.deny(&s));
    }

    #[test]
    fn added_rules_outlive_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = Rules::default();
        all.keep_in(dir.path());
        assert!(all.is_empty());
        all.add(rule(r#"{"ports": [1]}"#)).unwrap();
        all.add(rule(r#"{"ports": [2]}"#)).unwrap();
        let mut next = Rules::configured(&[rule(r#"{"ports": [3]}"#)]);
        next.keep_in(dir.path());
        assert_eq!(next.shown()[0], all.shown()[0]);
        let said = next.shown().concat();
        let said: Vec<String> = said.iter().map(Rule::to_string).collect();
        assert_eq!(said, ["deny port 2", "deny port 1", "deny port 3"]);
        next.delete(2).unwrap();
        let mut last = Rules::default();
        last.keep_in(dir.path());
        assert_eq!(last.shown()[0], [rule(r#"{"ports": [2]}"#)]);
        for broken in ["{", r#"[{"prots": [1]}]"#, r#"[{"addresses": ["x"]}]"#] {
            std::fs::write(dir.path().join(FILE), broken).unwrap();
            let mut all = Rules::default();
            all.keep_in(dir.path());
            assert!(
                all.deny(&end("x", 0, ["10.0.0.1:1", "10.0.0.2:2"])),
                "{broken}"
            );
            all.delete(1).unwrap();
            assert!(all.is_empty());
        }
        for _ in all.shown()[0].len()..MOST {
            all.add(Rule::default()).unwrap();
        }
        assert!(matches!(all.add(Rule::default()), Err(Error::Full)));
    }
}
