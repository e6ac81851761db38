//! Programs that hand connections to other programs (inetd, CGI, workers, binary upgrades, socket activation), as people
//! run them: what arrives is what was sent, no connection is reset by the shim, and lanes are used.

use anyhow::{ensure, Result};
use std::time::Duration;
use underpass_tests::harness::{Daemon, Program};

/// Those whose programs other tests install anyway, and which take seconds. `make programs` runs all
/// (`UNDERPASS_HANDOVERS=all`).
const SOME: [&str; 3] = ["apache-cgi", "nginx", "fds-back-and-forth"];
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn root_handovers() -> Result<()> {
    let all = std::env::var("UNDERPASS_HANDOVERS").is_ok_and(|v| v == "all");
    let d = Daemon::start()?;
    for place in [d.place(), d.eager()] {
        let mut p = Program::python("handovers.py", &place);
        if !all {
            p = p.args(SOME);
        }
        let out = p.run(LIMIT)?;
        println!("{}", out.stdout);
        let ok = out.status.success() && !out.stdout.contains("FAILED");
        ensure!(ok, "{}\n{}\n{}", out.stdout, out.stderr, d.picture());
    }
    let s = d.stats()?;
    ensure!(s.resets == 0 && s.promoted > 20, "{}", d.picture());
    Ok(())
}
