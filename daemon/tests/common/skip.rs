/// Says that this test cannot run here, and why: `make` counts it as skipped (tools/xtask/src/steps.rs). (Not by `eprintln`,
/// which nobody sees of a test that passes.)
pub(crate) fn skip(why: &str) {
    let test = std::thread::current()
        .name()
        .unwrap_or_default()
        .to_string();
    let line = format!("\n*** SKIP: {test}: {why} ***\n");
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
}
