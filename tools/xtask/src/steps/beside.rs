//! Test programs beside each other: most of them wait most of the time.

use super::Count;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Mutex;

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
                    let args: Vec<_> = c.get_args().map(|a| a.to_string_lossy()).collect();
                    let name = args.join(" ");
                    let (said, ok) = output(c);
                    let Ok(mut done) = done.lock() else { return };
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

fn next(left: &Mutex<std::vec::IntoIter<Command>>) -> Option<Command> {
    left.lock().ok()?.next()
}

/// What it wrote to its output and its errors, in that order, and whether it succeeded.
fn output(mut c: Command) -> (Vec<u8>, bool) {
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
        assert_eq!(out.split(|b| *b == b'\n').count(), 4);
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
    fn one_that_cannot_start_or_says_nothing_is_no_success() {
        let mut count = Count::default();
        let mut out = Vec::new();
        let all = vec![Command::new("/nonexistent"), sh("exit 3")];
        assert!(!run(all, &mut count, &mut out));
        assert_eq!(count.failed, 2);
        assert!(count.names.iter().any(|n| n.0.contains("exit 3")));
    }
}
