//! Test programs beside each other: most of them wait most of the time.

use super::Count;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread::JoinHandle;

/// As many as CI has processors: a test whose own processes must share theirs takes longer, and sees what it seldom sees alone.
const AT_ONCE: usize = 2;

/// Runs these, prints the output of each when it has ended, and counts the results. True: all have succeeded.
pub fn run(commands: Vec<Command>, count: &mut Count, out: &mut (dyn Write + Send)) -> bool {
    let left = Mutex::new(commands.into_iter());
    let done = Mutex::new((count, out, true));
    std::thread::scope(|s| {
        for _ in 0..AT_ONCE {
            s.spawn(|| {
                while let Some(c) = next(&left) {
                    let words = std::iter::once(c.get_program()).chain(c.get_args());
                    let name: Vec<_> = words.map(|a| a.to_string_lossy()).collect();
                    let name = name.join(" ");
                    let (said, ok) = output(c);
                    let Ok(mut done) = done.lock() else { return };
                    let _ = writeln!(done.1, "-- {name}");
                    let _ = done.1.write_all(&said);
                    let text = String::from_utf8_lossy(&said);
                    let before = done.0.failed;
                    text.lines().for_each(|l| done.0.line(l.trim_end()));
                    if !ok && done.0.failed == before {
                        done.0.failed += 1;
                        done.0.failed(&format!("{name} (ended without a result)"));
                    }
                    done.2 &= ok;
                }
            });
        }
    });
    done.into_inner().is_ok_and(|d| d.2)
}

/// What a command wrote, and whether it succeeded.
pub type Outcome = (Vec<u8>, bool);

/// Steps that have begun before their place in the order, by name.
#[derive(Default)]
pub struct Early(Vec<(&'static str, JoinHandle<Outcome>)>);

impl Early {
    /// Begins a step's command, which takes what processors nobody else wants.
    pub fn begin(&mut self, name: &'static str, command: Option<Command>) {
        let Some(c) = command else { return };
        let mut nice = Command::new("nice");
        nice.arg("-n19").arg(c.get_program()).args(c.get_args());
        for (k, v) in c.get_envs() {
            match v {
                Some(v) => nice.env(k, v),
                None => nice.env_remove(k),
            };
        }
        if let Some(dir) = c.get_current_dir() {
            nice.current_dir(dir);
        }
        self.0.push((name, std::thread::spawn(|| output(nice))));
    }

    /// Waits for a step, if it has begun.
    pub fn end(&mut self, name: &str) -> Option<Outcome> {
        let at = self.0.iter().position(|(n, _)| *n == name)?;
        let (_, thread) = self.0.remove(at);
        Some(thread.join().unwrap_or_default())
    }
}

fn next(left: &Mutex<std::vec::IntoIter<Command>>) -> Option<Command> {
    left.lock().ok()?.next()
}

/// Builds tests by a cargo that is asked for its messages as JSON (`--message-format`), and says how to run each program of
/// them as cargo would: in the folder of its package. Those called `first` begin. `None`: the build has failed.
pub fn built(mut c: Command, first: &[&str]) -> Option<Vec<Command>> {
    let out = c.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let out = out.ok().filter(|o| o.status.success())?;
    Some(programs(&String::from_utf8_lossy(&out.stdout), first))
}

fn programs(json: &str, first: &[&str]) -> Vec<Command> {
    let artifacts = json.lines().filter_map(|l| {
        let m: serde_json::Value = serde_json::from_str(l).ok()?;
        let text = |v: &serde_json::Value| v.as_str().map(str::to_string);
        let is_test = m["profile"]["test"] == true;
        let program = text(&m["executable"]).filter(|_| is_test)?;
        Some((
            text(&m["target"]["name"])?,
            program,
            text(&m["manifest_path"])?,
        ))
    });
    let mut all: Vec<_> = artifacts.collect();
    all.sort_by_key(|(name, ..)| !first.contains(&name.as_str()));
    let command = |(_, program, manifest): (String, String, String)| {
        let mut c = Command::new(program);
        if let Some(folder) = Path::new(&manifest).parent() {
            c.current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
        }
        c
    };
    all.into_iter().map(command).collect()
}

/// Runs it. Its output and its errors are in the order in which it wrote them.
fn output(mut c: Command) -> Outcome {
    let run = || {
        let (mut from, to) = std::io::pipe()?;
        c.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
        let mut child = c.spawn()?;
        drop(c); // its ends of the pipe
        let mut said = Vec::new();
        from.read_to_end(&mut said)?;
        Ok::<_, std::io::Error>((said, child.wait()?.success()))
    };
    run().unwrap_or_else(|e| (format!("{e}\n").into_bytes(), false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut c = Command::new("sh");
        c.args(["-c", script]);
        c
    }

    #[test]
    fn all_run_and_all_count() {
        let passed = |n| sh(&format!("echo 'test result: ok. {n} passed; 0 failed;'"));
        let failed = sh(
            "echo 'test a ... FAILED' >&2; echo 'test result: FAILED. 1 passed; 1 failed;'; exit 1",
        );
        let mut count = Count::default();
        let mut out = Vec::new();
        let three = vec![passed(1), passed(2), passed(4)];
        assert!(run(three, &mut count, &mut out));
        assert_eq!(out.split(|b| *b == b'\n').count(), 7); // with the name of each
        assert_eq!((count.passed, count.failed), (7, 0));
        assert!(!run(
            vec![passed(8), failed, passed(16)],
            &mut count,
            &mut out
        ));
        assert_eq!((count.passed, count.failed), (32, 1));
        assert_eq!(count.names.len(), 1);
    }

    #[test]
    fn what_cargo_has_built_runs_in_its_package() {
        let artifact = |name: &str, test: bool, program: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/tmp/Cargo.toml","target":{{"name":"{name}"}},"profile":{{"test":{test}}},"executable":{program}}}"#
            )
        };
        let json = [
            artifact("short", true, r#""/bin/pwd""#),
            artifact("a program", false, r#""/bin/false""#),
            artifact("a library", true, "null"),
            r#"{"reason":"build-finished","success":true}"#.into(),
            artifact("long", true, r#""/bin/true""#),
        ];
        let mut all = programs(&json.join("\n"), &["long"]);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].get_program(), "/bin/true");
        assert_eq!(output(all.remove(1)), (b"/tmp\n".to_vec(), true));
        assert!(built(sh("echo '{}'; exit 1"), &[]).is_none());
    }

    #[test]
    fn one_that_cannot_start_or_says_nothing_is_no_success() {
        let mut count = Count::default();
        let mut out = Vec::new();
        let all = vec![Command::new("/nonexistent"), sh("exit 3")];
        assert!(!run(all, &mut count, &mut out));
        assert_eq!(count.failed, 2);
        assert!(count.names.iter().any(|n| n.0.contains("exit 3")));
    }
}
