//! `underpass ss` against a daemon that always answers the same.

mod support;

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use support::{golden, rows, text, FakeDaemon};
use underpass_admin::{Request, Response, Row};

fn daemon() -> FakeDaemon {
    FakeDaemon::new(|r| match r {
        Request::Ss => Response::Ss { rows: rows() },
        r => Response::Error {
            message: format!("unexpected {r:?}"),
        },
    })
}

fn ss(args: &[&str]) -> String {
    let d = daemon();
    let out = d.run(&[&["ss"], args].concat());
    assert_eq!(text(&out.stderr), "");
    assert!(out.status.success());
    assert_eq!(d.requests(), ["{\"op\":\"ss\"}"]);
    text(&out.stdout)
}

#[test]
fn every_variant_looks_as_recorded() {
    for (args, name) in [
        (&[] as &[&str], "ss.txt"),
        (&["-a"], "ss-a.txt"),
        (&["-l"], "ss-l.txt"),
        (&["-aW"], "ss-aW.txt"),
        (&["-D"], "ss-D.txt"),
        (&["-R"], "ss-R.txt"),
        (&["-ae"], "ss-ae.txt"),
        (&["-j"], "ss-j.json"),
        (&["-aj"], "ss-aj.json"),
        (&["-Dj"], "ss-Dj.json"),
        (&["-Rj"], "ss-Rj.json"),
        (&["-ej"], "ss-ej.json"),
    ] {
        golden(name, &ss(args));
    }
}

/// `-d` also asks the kernel about the inodes: these can be none of its sockets.
#[test]
fn debug_variants_look_as_recorded() {
    let d = FakeDaemon::new(|_| {
        let mut rows = rows();
        rows.iter_mut().for_each(|r| r.inode += 1 << 32);
        Response::Ss { rows }
    });
    for (args, name) in [(&["ss", "-d"], "ss-d.txt"), (&["ss", "-dD"], "ss-dD.txt")] {
        golden(name, &text(&d.run(args).stdout));
    }
}

#[test]
fn the_shutdown_column_is_the_kernels() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    a.shutdown(Shutdown::Write).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", a.as_raw_fd())).unwrap();
    let inode: u64 = link.to_str().unwrap()[8..]
        .trim_end_matches(']')
        .parse()
        .unwrap();
    let row = Row {
        inode,
        ..rows()[2].clone()
    };
    let d = FakeDaemon::new(move |_| Response::Ss {
        rows: vec![row.clone()],
    });
    let v: serde_json::Value = serde_json::from_slice(&d.run(&["ss", "-dj"]).stdout).unwrap();
    assert_eq!(v[0]["shutd"], "<-W");
}

/// The positions at which scripts cut the columns of `smcss`.
#[test]
fn columns_stand_where_smcss_puts_them() {
    let t = ss(&["-a"]);
    let head = t.lines().next().unwrap();
    assert_eq!(
        head,
        "State          UID   Inode   Local Address           Peer Address            Intf Mode"
    );
    let row = t.lines().find(|l| l.contains("0004001")).unwrap();
    for (title, value) in [
        ("State", "ACTIVE "),
        ("UID", "01000 "),
        ("Inode", "0004001 "),
        ("Local", "127.0.0.1:6379 "),
        ("Peer", "127.0.0.1:40112 "),
        ("Intf", "0000 "),
        ("Mode", "SMCD"),
    ] {
        assert!(
            row[head.find(title).unwrap()..].starts_with(value),
            "{title}: {row}"
        );
    }
}

#[test]
fn options_select_the_states_and_modes_that_they_select_in_smcss() {
    let inodes = |args: &[&str]| -> Vec<u64> {
        let v: serde_json::Value = serde_json::from_str(&ss(&[&["-j"], args].concat())).unwrap();
        v.as_array()
            .unwrap()
            .iter()
            .map(|r| r["inode"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(inodes(&[]), [4001, 12345678, 4010, 4011, 4012, 4014, 4013]);
    assert_eq!(
        inodes(&["-a"]),
        [7, 81, 4001, 12345678, 4010, 4011, 4012, 4014, 4013]
    );
    assert_eq!(inodes(&["-l"]), [81]);
    assert_eq!(inodes(&["-D"]), [4001, 12345678]);
    assert_eq!(inodes(&["-R"]), [4012, 4014]);
    assert_eq!(inodes(&["-aR"]), [4012, 4014]);
}

#[test]
fn one_ends_token_is_the_others_peer_token() {
    let v: serde_json::Value = serde_json::from_str(&ss(&["-jD"])).unwrap();
    let (a, b) = (&v[0], &v[1]);
    assert_eq!(
        (&a["token"], &a["peer-token"]),
        (&b["peer-token"], &b["token"])
    );
    assert_eq!((&a["gid"], &a["peer-gid"]), (&b["peer-gid"], &b["gid"]));
    assert_eq!(a["linkid"], b["linkid"]);
    assert_ne!(a["gid"], b["gid"]);
}

/// Where smcss prints them, and in its format.
#[test]
fn the_columns_of_a_rail_stand_where_smcss_puts_them() {
    let t = ss(&["-R"]);
    let head = t.lines().next().unwrap();
    assert!(head.ends_with(
        "Role IB-device       Port Linkid GID                                      Peer-GID"
    ));
    let row = |inode: &str| t.lines().find(|l| l.contains(inode)).unwrap();
    for (title, value, unknown) in [
        ("Mode", "SMCR ", "SMCR "),
        ("Role", "SERV ", "- "),
        ("IB-device", "mlx5_bond_0 ", "- "),
        ("Port", "01 ", "- "),
        ("Linkid", "1a ", "- "),
        ("GID", "fe80:0000:0000:0000:0a94:efff:fe33:4401 ", "- "),
        ("Peer-GID", "0000:0000:0000:0000:0000:ffff:c0a8:64c8", "-"),
    ] {
        let at = head.find(title).unwrap();
        assert!(row("0004012")[at..].starts_with(value), "{title}: {t}");
        assert!(row("0004014")[at..].starts_with(unknown), "{title}: {t}");
    }
}

/// A container's caller is not told the nodes' addresses.
#[test]
fn an_address_that_is_kept_back_is_a_dash() {
    let d = FakeDaemon::new(|_| {
        let mut rows = rows();
        for r in rows.iter_mut().filter_map(|r| r.rail.as_mut()) {
            r.gid.clear();
            r.peer_gid.clear();
        }
        Response::Ss { rows }
    });
    let v: serde_json::Value = serde_json::from_slice(&d.run(&["ss", "-Rj"]).stdout).unwrap();
    assert_eq!(v[0]["ib-device"], "mlx5_bond_0");
    assert!(v[0]["gid"].is_null() && v[0]["peer-gid"].is_null());
}

#[test]
fn an_empty_table_has_a_header_and_empty_json_is_an_array() {
    let d = FakeDaemon::new(|_| Response::Ss { rows: Vec::new() });
    assert_eq!(text(&d.run(&["ss"]).stdout).lines().count(), 1);
    assert_eq!(text(&d.run(&["ss", "-j"]).stdout), "[]\n");
}

#[test]
fn nothing_in_a_row_can_steer_the_terminal() {
    // The columns of a mode are shown only for one that is known.
    for known in [false, true] {
        let d = FakeDaemon::new(move |_| {
            let mut rows = rows();
            for r in &mut rows {
                let rail = r.rail.as_mut();
                let rail = rail.map(|r| [&mut r.role, &mut r.device, &mut r.gid, &mut r.peer_gid]);
                let mode = (!known).then_some(&mut r.mode);
                let texts = [&mut r.state, &mut r.local, &mut r.peer, &mut r.intf];
                let more = [&mut r.up, &mut r.comm, &mut r.role];
                let all = texts.into_iter().chain(more).chain(mode);
                for s in all.chain(rail.into_iter().flatten()) {
                    s.push_str("\u{1b}[2J\n");
                }
            }
            Response::Ss { rows }
        });
        for option in ["-a", "-aW", "-ae", "-d", "-D", "-R", "-Re"] {
            let out = text(&d.run(&["ss", option]).stdout);
            assert!(
                !out.contains('\u{1b}') && out.lines().all(|l| !l.starts_with("[2J")),
                "{option}: {out}"
            );
        }
    }
}
