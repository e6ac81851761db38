//! The control path as shims see it: hello, registration, pairing, link groups, lanes.

mod common;
use common::*;
use lane::family::TABLE_BYTES;
use lane::proto::msg::{ToDaemon, ToShim};
use lane::proto::reason::Reason;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

fn refused(d: &Daemon, hello: ToDaemon, fds: &[&dyn AsFdDyn]) -> u32 {
    let s = dial(&d.dir);
    say(&s, &hello, fds);
    let Some((ToShim::Refused { reason }, _)) = hear(&s) else {
        panic!("not refused")
    };
    assert!(hear(&s).is_none(), "and cut off");
    reason
}

#[test]
fn hello_is_checked() {
    let d = Daemon::plain();
    let good = table_fd(TABLE_BYTES, SEALS);
    let with = |version, min_version| ToDaemon::Hello {
        version,
        min_version,
        pid: 1,
        table_bytes: TABLE_BYTES as u64,
    };
    let newer = with(lane::VERSION + 9, lane::VERSION + 1);
    assert_eq!(refused(&d, newer, &[&good]), Reason::VersionMismatch.code());
    assert_eq!(
        refused(&d, with(0, 0), &[&good]),
        Reason::VersionMismatch.code()
    );
    let sync = Reason::Sync.code();
    assert_eq!(refused(&d, hello(), &[]), sync, "no table");
    let three: [&dyn AsFdDyn; 3] = [&good; 3];
    assert_eq!(refused(&d, hello(), &three), sync, "too many");
    assert_eq!(
        refused(&d, hello(), &[&table_fd(TABLE_BYTES - 4096, SEALS)]),
        sync,
        "too small"
    );
    assert_eq!(
        refused(&d, hello(), &[&table_fd(TABLE_BYTES, SealFlags::GROW)]),
        sync,
        "can shrink"
    );
    assert_eq!(
        refused(&d, hello(), &[&std::fs::File::open("/").unwrap()]),
        sync,
        "no memory file"
    );
    assert_eq!(
        refused(&d, ToDaemon::Forget { conn: 0, gen: 0 }, &[]),
        sync,
        "no hello"
    );
    assert_eq!(d.stats().clients, 0);

    // A newer shim that still speaks our version is welcome.
    let s = dial(&d.dir);
    say(&s, &with(lane::VERSION + 9, lane::MIN_VERSION), &[&good]);
    assert!(matches!(
        hear(&s),
        Some((
            ToShim::HelloAck {
                version: lane::VERSION,
                ..
            },
            _
        ))
    ));
    // Twice is once too often.
    say(&s, &hello(), &[&good]);
    assert!(hear(&s).is_none());
}

#[test]
fn two_ends_get_one_lane() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    assert_eq!(
        (x.group, x.lane, x.tag, x.epoch),
        (y.group, y.lane, y.tag, y.epoch)
    );
    assert_ne!(x.side, y.side);
    assert_ne!(x.tag, 0);
    let s = d.until("the lane", |s| s.lanes == 1);
    assert_eq!(
        (s.clients, s.links, s.registered, s.paired, s.declined),
        (2, 1, 2, 1, 0)
    );

    // The second connection uses the same link group.
    let (x2, y2) = pair(&mut a, &mut b);
    assert_eq!((x2.group, x2.side, y2.side), (x.group, x.side, y.side));
    assert_ne!((x2.lane, x2.tag), (x.lane, x.tag));

    // Every message was announced.
    for s in [&mut a, &mut b] {
        while s.credits < CREDITS {
            s.credit();
        }
        // The word follows the message, by a moment.
        let word = || u32::from(s.notice.as_ref().unwrap().byte(0).load(Relaxed));
        let end = std::time::Instant::now() + PATIENCE;
        while word() != s.seen + 1 {
            assert!(
                std::time::Instant::now() < end,
                "{} messages, {}",
                s.seen + 1,
                word()
            );
        }
    }
}

#[test]
fn connections_with_bytes_on_them_and_ipv6() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let l = std::net::TcpListener::bind("[::1]:0").unwrap();
    let mut c = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let mut s = l.accept().unwrap().0;
    c.write_all(&[1; 5000]).unwrap();
    s.read_exact(&mut [0; 3000]).unwrap(); // the rest lies in the kernel
    s.write_all(&[2; 70]).unwrap();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register_at(i, &c, 5000, 0);
    b.register_at(j, &s, 70, 3000);
    offers(&mut a, &mut b);
}

/// The other client gets the area read-only, whatever it tries.
#[test]
fn areas_are_sealed_for_the_other_client() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    let (sa, sb) = (&a.sides[&(x.group, x.side)], &b.sides[&(y.group, y.side)]);
    let (fd, map) = &sb.peer[&0];
    let (_, own) = &sa.own[&0];
    for at in [4000, own.bytes() - 1] {
        own.byte(at).store(77, Relaxed);
        assert_eq!(map.byte(at).load(Relaxed), 77, "it is the same memory");
        assert_eq!(
            Map::new(fd, 4096, true).err(),
            Some(Errno::PERM),
            "no writable mapping"
        );
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
        for f in [
            fd.try_clone().unwrap(),
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(path)
                .unwrap()
                .into(),
        ] {
            assert_eq!(
                Map::new(&f, 4096, true).err(),
                Some(Errno::PERM),
                "nor by opening it again"
            );
            assert_eq!(rustix::io::pwrite(&f, b"x", 0), Err(Errno::PERM));
            assert_eq!(rustix::fs::ftruncate(&f, 0), Err(Errno::PERM));
            let punch =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            assert_eq!(rustix::fs::fallocate(&f, punch, 0, 4096), Err(Errno::PERM));
            assert_eq!(
                rustix::fs::fcntl_add_seals(&f, SealFlags::WRITE),
                Err(Errno::PERM)
            );
        }
        own.byte(at).store(78, Relaxed);
        assert_eq!(map.byte(at).load(Relaxed), 78, "its writer still can");
    }
    // The heads of both areas say what they are.
    for (s, lane) in [(sa, x), (sb, y)] {
        let h = &s.own[&0].1.control().header;
        assert_eq!(h.magic.load(Relaxed), lane::abi::MAGIC);
        assert_eq!(h.version.load(Relaxed), u32::from(lane::VERSION));
        assert_eq!(
            (h.side.load(Relaxed), h.group.load(Relaxed)),
            (u32::from(lane.side), lane.group)
        );
        assert_eq!(h.lanes.load(Relaxed) as usize, lane::abi::LANES);
    }
    // The doorbell ends belong together.
    lane::notify::doorbell::ring(sa.bell.as_ref().unwrap().as_fd());
    assert_eq!(
        lane::notify::doorbell::drain(sb.bell.as_ref().unwrap().as_fd()),
        lane::notify::doorbell::Drained::Rung
    );
    // Nobody but the clients holds an end: a client that is gone can be heard.
    let bell = b
        .sides
        .get_mut(&(y.group, y.side))
        .unwrap()
        .bell
        .take()
        .unwrap();
    drop(a);
    assert_eq!(
        lane::notify::doorbell::drain(bell.as_fd()),
        lane::notify::doorbell::Drained::Gone
    );
}

#[test]
fn nothing_is_offered_before_both_have_mapped() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    b.helpful = false;
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    b.register(j, &s);
    let mut group = None;
    while group.is_none() {
        if let Some(ToShim::GroupNew { group: l, side, .. }) = b.step() {
            group = Some((l, side));
        }
    }
    let (group, side) = group.unwrap();
    a.until("its own area", |m| {
        matches!(m, ToShim::GroupNew { .. }).then_some(())
    });
    b.until("the peer's area", |m| {
        matches!(m, ToShim::PeerChunk { chunk: 0, .. }).then_some(())
    });
    // Unsealed as long as its writer has not mapped it: nobody else has it.
    let seals = |b: &Shim| rustix::fs::fcntl_get_seals(&b.sides[&(group, side)].own[&0].0).unwrap();
    assert!(!seals(&b).contains(SealFlags::FUTURE_WRITE));
    b.say(
        ToDaemon::Mapped {
            group,
            side,
            chunk: 0,
        },
        &[],
    );
    a.until("the peer's area", |m| {
        matches!(m, ToShim::PeerChunk { chunk: 0, .. }).then_some(())
    });
    assert!(seals(&b).contains(SealFlags::FUTURE_WRITE));
    offers(&mut a, &mut b);
}

#[test]
fn both_ends_in_one_process() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), a.enter(&s, false));
    a.register(i, &c);
    a.register(j, &s);
    let (x, y) = (a.offer(), a.offer());
    assert_eq!((x.group, x.lane, x.tag), (y.group, y.lane, y.tag));
    assert_ne!(x.side, y.side);
    assert_ne!(x.conn, y.conn);
    assert!(a.sides[&(x.group, x.side)].peer.contains_key(&0));
    a.say(
        ToDaemon::LaneDone {
            group: x.group,
            side: x.side,
            lane: x.lane,
        },
        &[],
    );
    a.say(
        ToDaemon::LaneDone {
            group: y.group,
            side: y.side,
            lane: y.lane,
        },
        &[],
    );
    d.until("the lane's end", |s| s.lanes == 0);
}

#[test]
fn a_lane_is_used_again_with_later_epochs() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, y) = pair(&mut a, &mut b);
    a.say(
        ToDaemon::LaneDone {
            group: x.group,
            side: x.side,
            lane: x.lane,
        },
        &[],
    );
    // One side is not done: the slot is not free.
    let (x2, _) = pair(&mut a, &mut b);
    assert_ne!(x2.lane, x.lane);
    b.say(
        ToDaemon::LaneDone {
            group: y.group,
            side: y.side,
            lane: y.lane,
        },
        &[],
    );
    d.until("the slot", |s| s.lanes == 1);
    let (x3, y3) = pair(&mut a, &mut b);
    assert_eq!(x3.lane, x.lane);
    assert_eq!(x3.epoch, y3.epoch);
    assert!(
        x3.epoch.get() >= x.epoch.get() + 65_536,
        "{} after {}",
        x3.epoch.get(),
        x.epoch.get()
    );
    assert_ne!(x3.tag, x.tag);
}

#[test]
fn areas_grow() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (x, _) = pair(&mut a, &mut b);
    a.say(
        ToDaemon::WantChunk {
            group: x.group,
            side: x.side,
        },
        &[],
    );
    a.until("the chunk", |m| {
        matches!(m, ToShim::Chunk { chunk: 2, .. }).then_some(())
    });
    b.until("the peer's chunk", |m| {
        matches!(m, ToShim::PeerChunk { chunk: 2, .. }).then_some(())
    });
    a.until("ready", |m| {
        matches!(m, ToShim::ChunkReady { chunk: 2, .. }).then_some(())
    });
}

#[test]
fn a_group_that_cannot_be_mapped() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    b.helpful = false;
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    b.register(j, &s);
    let (group, side) = b.until("the link group", |m| match *m {
        ToShim::GroupNew { group, side, .. } => Some((group, side)),
        _ => None,
    });
    b.say(ToDaemon::GroupFailed { group, side }, &[]);
    a.until("the link group's end", |m| {
        matches!(m, ToShim::PeerGone { .. }).then_some(())
    });
    let (reason, _, retry) = a.declined(i);
    assert_eq!(reason, Reason::Memory.code());
    assert!(retry > 0);
    d.until("nothing", |s| s.links == 0 && s.lanes == 0);
}
