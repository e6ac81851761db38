//! What `deploy/` ships must be what the daemon reads.

use std::path::Path;
use underpassd::config::Config;

#[test]
fn the_example_configuration_shows_the_defaults() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/underpassd.toml");
    assert_eq!(Config::load(&file).unwrap(), Config::default());
    let text = std::fs::read_to_string(file).unwrap();
    // Every key is there, in use or as a comment: a new one must be documented.
    let all = format!("{:?}", Config::default());
    let keys = all
        .split(|c: char| !(c.is_ascii_lowercase() || c == '_' || c == ':' || c.is_ascii_digit()));
    for key in keys
        .filter_map(|w| w.strip_suffix(':'))
        .filter(|k| k.contains(char::is_alphanumeric))
    // (addresses have colons, too)
    {
        let shown = text
            .lines()
            .map(|l| l.trim_start_matches(['#', '[']))
            .any(|l| l.starts_with(key));
        assert!(shown, "`{key}` is not in deploy/underpassd.toml");
    }
}
