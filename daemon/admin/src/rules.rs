//! Rules that say which connections may have lanes, as configurations and operators write them.

use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};

/// What becomes of a connection that a rule is about.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It stays on TCP, reason `config`.
    #[default]
    Deny,
    /// It may have a lane, whatever later rules say.
    Allow,
}

/// A rule is about a connection end that has one of the values of each list that is not empty; without lists, about all.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// What it does.
    pub action: Action,
    /// Names of programs, as in `/proc/PID/comm`. A program can change its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<String>,
    /// Users of the process that holds the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uids: Vec<u32>,
    /// Addresses of either end, or ranges: `10.0.0.0/8`, `fd00::1`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Ports of either end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// Kubernetes namespaces of the pod whose process holds the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
}

fn list<T: Display>(
    f: &mut fmt::Formatter<'_>,
    all: &mut bool,
    name: &str,
    of: &[T],
) -> fmt::Result {
    for (n, one) in of.iter().enumerate() {
        *all = false;
        match n {
            0 => write!(f, " {name} {one}")?,
            _ => write!(f, ",{one}")?,
        }
    }
    Ok(())
}

impl Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.action {
            Action::Deny => "deny",
            Action::Allow => "allow",
        })?;
        let mut all = true;
        list(f, &mut all, "program", &self.programs)?;
        list(f, &mut all, "uid", &self.uids)?;
        list(f, &mut all, "address", &self.addresses)?;
        list(f, &mut all, "port", &self.ports)?;
        list(f, &mut all, "namespace", &self.namespaces)?;
        match all {
            true => f.write_str(" all"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_read_well() {
        assert_eq!(Rule::default().to_string(), "deny all");
        let r = Rule {
            action: Action::Allow,
            uids: vec![0, 5],
            ports: vec![22],
            ..Rule::default()
        };
        assert_eq!(r.to_string(), "allow uid 0,5 port 22");
        let text = serde_json::to_string(&r).unwrap();
        assert_eq!(text, r#"{"action":"allow","uids":[0,5],"ports":[22]}"#);
        assert_eq!(serde_json::from_str::<Rule>(&text).unwrap(), r);
    }
}
