//! What the screen shows, and that no keys and no answers bring it into disorder.

use super::lines::View;
use super::sample::Seen;
use super::state::{Key, State};
use super::{draw, lines};
use proptest::prelude::*;
use ratatui::backend::TestBackend;
use ratatui::Terminal;
use std::time::Duration;
use underpass_admin::{PodRow, RailLinks, RailStats, Row, Stats, Where};

fn shop(pod: &str) -> Where {
    Where {
        namespace: "shop".into(),
        pod: pod.into(),
        container: "main".into(),
        ..Where::default()
    }
}

fn row(inode: u64, mode: &str, bytes: u64) -> Row {
    Row {
        state: "ACTIVE".into(),
        inode,
        local: format!("10.0.0.1:{inode}"),
        peer: "10.0.0.2:50000".into(),
        mode: mode.into(),
        up: if mode.starts_with("TCP") {
            "none"
        } else {
            "both"
        }
        .into(),
        pid: 100,
        comm: "web\u{1b}[2J".into(),
        lane_tx_bytes: bytes,
        tcp_rx_bytes: bytes / 2,
        ..Row::default()
    }
}

/// A second look is one second after the first, and each end has sent more by its inode.
fn seen(second: u64) -> Seen {
    let moved = |inode: u64| inode * 1000 * (second + 1);
    let mut rows = vec![
        row(81, "SMCD", moved(81)),
        row(82, "TCP 0x03010000", moved(82)),
        row(83, "SMCR", moved(83)),
    ];
    rows[0].at = Some(shop("web-0"));
    rows[1].reason = 0x0301_0000;
    let rail = RailStats {
        device: "mlx5_0".into(),
        port: 1,
        links: vec![RailLinks {
            node: "node2".into(),
            up: 4,
            lanes: 1,
        }],
        bytes: moved(1000),
        ..RailStats::default()
    };
    Seen {
        at: Duration::from_secs(second),
        rows,
        pods: Ok(vec![PodRow {
            at: shop("web-0"),
            wanted: true,
            why_not: "no\nroom".into(),
            smcd: 1,
            ..PodRow::default()
        }]),
        stats: Box::new(Stats {
            version: "0.1.0".into(),
            uptime_s: 61 + second,
            rails: vec![rail],
            ..Stats::default()
        }),
    }
}

fn state() -> State {
    let mut s = State::new(seen(0), View::Connections);
    s.take(Ok(seen(1)));
    s
}

fn press(s: &mut State, keys: &str) {
    for c in keys.chars() {
        let key = match c {
            '\t' => Key::Tab,
            '\n' => Key::Enter,
            '\u{1b}' => Key::Esc,
            c => Key::Char(c),
        };
        assert!(!s.press(key));
    }
}

/// The inodes of the lines, from the top.
fn order(s: &State) -> Vec<String> {
    let port = |l: &lines::Line| l.cells[5].text.rsplit(':').next().unwrap().to_owned();
    s.lines().iter().map(port).collect()
}

fn drawn(s: &mut State, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut t = Terminal::new(TestBackend::new(width, height)).unwrap();
    t.draw(|f| draw::draw(f, s)).unwrap();
    t
}

fn screen(s: &mut State, width: u16, height: u16) -> String {
    drawn(s, width, height).backend().to_string()
}

/// Compares with a file beside the tests; `BLESS=1` writes it instead.
fn golden(name: &str, got: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/");
    let path = format!("{path}{name}");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, got).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(got, want, "{path} (BLESS=1 rewrites it)");
}

#[test]
fn every_view_looks_as_recorded() {
    let mut s = state();
    golden("top-connections.txt", &screen(&mut s, 150, 20));
    golden("top-narrow.txt", &screen(&mut s, 80, 10));
    press(&mut s, "2");
    golden("top-pods.txt", &screen(&mut s, 110, 18));
    press(&mut s, "\t");
    golden("top-rails.txt", &screen(&mut s, 110, 18));
    press(&mut s, "?");
    golden("top-help.txt", &screen(&mut s, 90, 20));
}

#[test]
fn a_daemon_that_is_away_is_said_and_the_last_lines_stay() {
    let mut s = state();
    let before = s.lines().to_vec();
    s.take(Err("no underpassd is running".into()));
    press(&mut s, "/81\n");
    golden("top-away.txt", &screen(&mut s, 100, 8));
    assert_eq!(s.lines().len(), 1);
    press(&mut s, "\u{1b}");
    s.take(Ok(seen(2)));
    assert_eq!(s.trouble, None);
    assert_eq!(s.lines().len(), before.len());
}

#[test]
fn lines_are_sorted_by_the_chosen_column_either_way() {
    let mut s = state();
    assert_eq!(order(&s), ["83", "82", "81"], "most bytes per second first");
    press(&mut s, "r");
    assert_eq!(order(&s), ["81", "82", "83"]);
    press(&mut s, "<<"); // the mode, by its name
    assert_eq!(order(&s), ["81", "83", "82"]);
    press(&mut s, "<s");
    assert_eq!(s.sort().column, 0, "round, and back");
    press(&mut s, "2");
    press(&mut s, "1>");
    assert_eq!(s.sort().column, 1, "each view has its own");
}

/// The daemon says them in no order.
#[test]
fn equal_lines_keep_their_places() {
    let mut s = state();
    press(&mut s, "<"); // by the directions that are up
    assert_eq!(order(&s), ["81", "83", "82"]);
    let mut again = seen(2);
    again.rows.reverse();
    s.take(Ok(again));
    assert_eq!(order(&s), ["81", "83", "82"]);
}

#[test]
fn a_chosen_line_is_followed_and_the_first_is_not() {
    let mut s = state();
    press(&mut s, "r");
    assert_eq!((s.selected(), order(&s)[0].as_str()), (0, "81"));
    s.press(Key::Down);
    assert_eq!(order(&s)[s.selected()], "82");
    press(&mut s, "<<");
    assert_eq!((s.selected(), order(&s)[2].as_str()), (2, "82"));
    s.press(Key::End);
    let mut fewer = seen(2);
    fewer.rows.retain(|r| r.inode == 83);
    s.take(Ok(fewer));
    assert_eq!(s.selected(), 0, "the chosen one is gone");
}

#[test]
fn a_filter_keeps_lines_with_its_text_in_any_column() {
    let mut s = state();
    press(&mut s, "/SHOP/q");
    assert!(s.lines().is_empty(), "q is a letter now");
    s.press(Key::Backspace);
    assert_eq!(order(&s), ["81"]);
    press(&mut s, "\n");
    assert!(s.press(Key::Char('q')), "and a key again");
    press(&mut s, "\u{1b}");
    assert_eq!(s.lines().len(), 3);
}

#[test]
fn nothing_in_a_name_can_steer_the_terminal() {
    let mut s = state();
    for key in ["1", "2", "3"] {
        press(&mut s, key);
        let all = s.lines().iter().flat_map(|l| &l.cells);
        let mut text: String = all.map(|c| c.text.as_str()).collect();
        text.push_str(&draw::text(&s).replace('\n', ""));
        text.extend(s.about());
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Press(Key),
    Look(Vec<Row>, u64),
    Away,
    Draw(u16, u16),
}

fn key() -> impl Strategy<Value = Key> {
    let others = [
        Key::Tab,
        Key::BackTab,
        Key::Up,
        Key::Down,
        Key::Down,
        Key::PageUp,
        Key::PageDown,
        Key::Home,
        Key::End,
        Key::Enter,
        Key::Esc,
        Key::Backspace,
    ];
    prop_oneof![
        proptest::sample::select(others.to_vec()),
        proptest::sample::select(b"q123s<>r/ ?85\xfc".as_slice()).prop_map(|b| Key::Char(b.into())),
    ]
}

fn any_row() -> impl Strategy<Value = Row> {
    let mode = proptest::sample::select(&["SMCD", "SMCR", "TCP 0x05000000", "", "\u{1b}"][..]);
    (0..30u64, mode, any::<u64>(), ".{0,20}").prop_map(|(inode, mode, bytes, name)| Row {
        comm: name.clone(),
        at: (inode % 2 == 0).then(|| shop(&name)),
        ..row(inode, mode, bytes)
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => key().prop_map(Step::Press),
        2 => (proptest::collection::vec(any_row(), 0..40), 0..3u64).prop_map(|(r, t)| Step::Look(r, t)),
        1 => Just(Step::Away),
        2 => (0..200u16, 0..50u16).prop_map(|(w, h)| Step::Draw(w, h)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is pressed and said: a line is selected if there is one, and is on the screen.
    #[test]
    fn no_keys_and_no_answers_bring_it_into_disorder(steps in proptest::collection::vec(step(), 1..60)) {
        let mut s = state();
        for step in steps {
            match step {
                Step::Press(k) => { s.press(k); }
                Step::Look(rows, later) => {
                    let pods = rows.iter().filter_map(|r| r.at.clone());
                    let pods = pods.map(|at| PodRow { at, ..PodRow::default() }).collect();
                    let at = s.seen.at + Duration::from_millis(later);
                    s.take(Ok(Seen { at, rows, pods: Ok(pods), ..seen(0) }));
                }
                Step::Away => s.take(Err("away".into())),
                Step::Draw(w, h) => {
                    drawn(&mut s, w, h);
                    draw::text(&s);
                }
            }
            let n = s.lines().len();
            prop_assert!(s.selected() < n.max(1));
            let window = s.window(7);
            prop_assert!(window.end <= n && window.len() == n.min(7));
            prop_assert!(n == 0 || window.contains(&s.selected()));
            s.about();
        }
    }
}
