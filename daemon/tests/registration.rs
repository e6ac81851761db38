//! Registrations that are wrong, and messages that a correct shim does not send.

mod common;
use common::*;
use lane::abi::TcpPos;
use lane::family::{state, TABLE_BYTES};
use lane::proto::msg::ToDaemon;
use lane::proto::reason::Reason;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn what_is_no_open_connection_is_declined() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, _s) = tcp();
    let no = Reason::NotEstablished.code();
    let forged: [(&str, &dyn AsFdDyn, u32); 4] = [
        ("a file", &std::fs::File::open("/").unwrap(), no),
        (
            "a listening socket",
            &std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
            no,
        ),
        (
            "a datagram socket",
            &std::net::UdpSocket::bind("127.0.0.1:0").unwrap(),
            no,
        ),
        // A Unix socket may have the connection's in its queue; here nothing is, as if taken back.
        (
            "its own control socket",
            &dial(&d.dir),
            Reason::Young.code(),
        ),
    ];
    for (what, fd, why) in forged {
        let i = a.enter(&c, true);
        a.register(i, fd);
        assert_eq!(a.declined(i).0, why, "{what}");
    }
    // Counts that the kernel does not know (one may be the SYN).
    let i = a.enter(&c, true);
    a.register_at(i, &c, 2, 0);
    assert_eq!(a.declined(i).0, Reason::Bypassed.code());
    // The table says it is another socket.
    let (other, _t) = tcp();
    let i = a.enter(&other, true);
    a.register(i, &c);
    assert_eq!(a.declined(i).0, no);
    // A socket connected to itself.
    let own = self_connected();
    let i = a.enter(&own, true);
    a.register(i, &own);
    assert_eq!(a.declined(i).0, Reason::SelfConnected.code());
    while a.credits < CREDITS {
        a.credit(); // every credit comes back
    }
}

fn self_connected() -> std::net::TcpStream {
    use rustix::net::*;
    let s = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    bind(&s, &"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap()).unwrap();
    let here: std::net::SocketAddr = getsockname(&s).unwrap().try_into().unwrap();
    connect(&s, &here).unwrap();
    s.into()
}

#[test]
fn registering_without_a_credit_ends_the_connection() {
    let d = Daemon::start(&["--no-bpf"]);
    let mut a = Shim::new(&d.dir);
    // A shim that registers far more than it may, all at once.
    d.stop();
    let (c, _s) = tcp();
    let i = a.enter(&c, true);
    for _ in 0..17 {
        a.register(i, &c);
    }
    d.resume();
    a.hung_up();
    assert_eq!(d.until("its end", |s| s.clients == 0).registered, 16);
}

/// What a shim that has the lane `x`, whose other end is `y`, must not say, and with how many descriptors.
fn wrong_messages(x: &Lane, y: &Lane) -> [(&'static str, ToDaemon, usize); 5] {
    let group = x.group;
    let mapped = |side| ToDaemon::Mapped {
        group,
        side,
        chunk: 1,
    };
    let register = || ToDaemon::Register {
        conn: 0,
        gen: 1,
        tx_tcp_pos: TcpPos::default(),
        rx_tcp_pos: TcpPos::default(),
        flags: 0,
    };
    let done = ToDaemon::LaneDone {
        group,
        side: x.side,
        lane: x.lane,
    };
    [
        ("the other's side", mapped(y.side), 0),
        ("no such side", mapped(2), 0),
        ("somebody's link group", done, 0),
        ("two descriptors", register(), 2),
        ("no descriptor", register(), 0),
    ]
}

#[test]
fn violations_end_the_connection() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    let (c, _s) = tcp();
    for (what, m, fds) in wrong_messages(&x, &y) {
        let mut s = Shim::new(&d.dir);
        let all: [&dyn AsFdDyn; 2] = [&c, &c];
        s.say(m, &all[..fds]);
        s.hung_up();
        println!("cut off for {what}");
    }
    // Noise and truncated messages, too.
    for noise in [&b"\x02\x00\xff\x00"[..], &b"\x01"[..]] {
        let mut s = Shim::new(&d.dir);
        rustix::io::write(&s.sock, noise).unwrap();
        s.hung_up();
    }
    // Messages of a newer kind, and about link groups that are gone, mean nothing.
    let mut s = Shim::new(&d.dir);
    rustix::io::write(&s.sock, b"\xff\x00\x00\x00").unwrap();
    s.say(
        ToDaemon::LaneDone {
            group: 1,
            side: 0,
            lane: 0,
        },
        &[],
    );
    let i = s.enter(&c, true);
    s.register_at(i, &c, 9, 9);
    s.declined(i);
    // The victim's link group is untouched.
    pair(&mut a, &mut b);
    assert_eq!(d.stats().links, 1);
}

#[test]
fn forgotten_ends_are_not_paired() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let i = a.enter(&c, true);
    a.register(i, &c);
    a.credit();
    a.say(
        ToDaemon::Forget {
            conn: i,
            gen: a.gen(i),
        },
        &[],
    );
    // The entry is used for something else, without a word.
    let (c2, s2) = tcp();
    let i2 = a.enter(&c2, true);
    a.register(i2, &c2);
    a.credit();
    a.conn(i2).gen.fetch_add(1, Relaxed);
    let (j, j2) = (b.enter(&s, false), b.enter(&s2, false));
    b.register(j, &s);
    b.register(j2, &s2);
    b.credit();
    b.credit();
    assert_eq!(d.stats().paired, 0);
    // Registered anew, it is found.
    a.register(i, &c);
    let (x, y) = offers(&mut a, &mut b);
    assert_eq!((x.conn, y.conn), (i, j));
}

#[test]
fn one_socket_registered_by_two() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, _s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&c, true));
    a.register(i, &c);
    a.credit();
    b.register(j, &c);
    let (reason, _, retry) = b.declined(j);
    assert_eq!(reason, Reason::Shared.code());
    assert!(retry > 0, "the first may only not have let go yet");
    a.conn(i).state.store(state::BUSY, Relaxed);
    b.register(j, &c);
    b.credit();
    b.credit();
    assert_eq!(d.stats().declined, 1);
}

#[test]
fn a_hostile_table_does_no_harm() {
    let d = Daemon::plain();
    let a = Shim::new(&d.dir);
    let (mut v, mut w) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let map = Map::new(&a.table_fd, TABLE_BYTES, true).unwrap();
    let mut x = 1u32;
    for at in 0..(1 << 20) {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        map.byte(at).store((x >> 24) as u8, Relaxed);
    }
    d.rows();
    d.stats();
    pair(&mut v, &mut w);
}
