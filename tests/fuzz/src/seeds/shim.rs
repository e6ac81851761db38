//! Between a shim and its daemon, and between two shims.

use lane::abi::{rx, tx, Cursor, Epoch, Loc, RxWord, TcpPos, TxWord, Word};
use lane::proto::frame::{Frame, Kind};
use lane::proto::msg::{op, register, ToDaemon, ToShim, MAX};

fn to_daemon() -> Vec<ToDaemon> {
    let (group, side, lane, conn, gen) = (7, 1, 70, 300, 2);
    let (tx_tcp_pos, rx_tcp_pos) = (TcpPos::new(100_000), TcpPos::new(70));
    vec![
        ToDaemon::Hello {
            version: lane::VERSION,
            min_version: lane::MIN_VERSION,
            pid: 4242,
            table_bytes: lane::family::TABLE_BYTES as u64,
        },
        ToDaemon::Register {
            conn,
            gen,
            tx_tcp_pos,
            rx_tcp_pos,
            flags: register::EAGER | register::CLIENT,
        },
        ToDaemon::RegisterReceived {
            conn,
            gen,
            tx_tcp_pos,
            rx_tcp_pos,
            flags: register::MISCOUNTED,
            from: register::ENDED,
            copies: 2,
        },
        ToDaemon::Mapped {
            group,
            side,
            chunk: 1,
        },
        ToDaemon::PeerMapped {
            group,
            side,
            chunk: 0,
        },
        ToDaemon::LaneDone { group, side, lane },
        ToDaemon::LaneRefused { group, side, lane },
        ToDaemon::LaneHeld { group, side, lane },
        ToDaemon::LaneShut { group, side, lane },
        ToDaemon::WantChunk { group, side },
        ToDaemon::GroupFailed { group, side },
        ToDaemon::Forget { conn, gen },
        ToDaemon::Moved { table_bytes: 4096 },
        ToDaemon::Reset {
            conn,
            gen,
            reason: 9,
        },
        ToDaemon::FuseBlown {},
        ToDaemon::TakeOver {
            group,
            side,
            lane,
            sender: 0,
        },
    ]
}

fn to_shim() -> Vec<ToShim> {
    let (group, side, lane, conn, gen) = (7, 0, 70, 300, 2);
    let (chunk, bytes) = (3, 16 << 20);
    vec![
        ToShim::HelloAck {
            version: lane::VERSION,
            client: 5,
            home: 6,
            credits: 16,
            ring_log2: 16,
            ring_max_log2: 22,
            probe_s: 60,
        },
        ToShim::Refused { reason: 3 },
        ToShim::Credit { n: 1 },
        ToShim::Decline {
            conn,
            gen,
            local: 4,
            peer: 0,
            retry_ms: 500,
        },
        ToShim::GroupNew {
            group,
            side,
            bytes,
            remote: 1,
        },
        ToShim::Chunk {
            group,
            side,
            chunk,
            bytes,
        },
        ToShim::PeerChunk {
            group,
            side,
            chunk,
            bytes,
        },
        ToShim::ChunkReady { group, side, chunk },
        ToShim::Offer {
            group,
            side,
            lane,
            conn,
            gen,
            epoch: Epoch::base(1),
            tag: u64::MAX / 3,
        },
        ToShim::PeerGone { group, side },
        ToShim::Command {
            conn,
            gen,
            op: op::UP,
        },
        ToShim::LaneGone {
            group,
            side,
            lane,
            conn,
            gen,
        },
        ToShim::TakenOver {
            group,
            side,
            lane,
            conn,
            gen,
        },
    ]
}

/// Every kind of message, and one with a field that a newer sender has appended.
pub(super) fn control() -> Vec<Vec<u8>> {
    let whole = |encode: &dyn Fn(&mut [u8; MAX]) -> usize| {
        let mut b = [0; MAX];
        let n = encode(&mut b);
        b[..n].to_vec()
    };
    let up = to_daemon();
    let down = to_shim();
    let up = up.iter().map(|m| whole(&|b| m.encode(b)));
    let mut all: Vec<_> = up
        .chain(down.iter().map(|m| whole(&|b| m.encode(b))))
        .collect();
    let mut longer = all[0].clone();
    longer[2] += 8;
    longer.extend([1; 8]);
    all.push(longer);
    all
}

pub(super) fn frames() -> Vec<Vec<u8>> {
    let frame = |kind| Frame {
        kind,
        epoch: Epoch::new(3),
        rest: 70,
        cursor: Cursor::new(1 << 33),
        tag: 0x5eed_5eed_0bad_cafe,
    };
    let all = [Kind::Down, Kind::Fin].map(|k| frame(k).encode().to_vec());
    let mut all = all.to_vec();
    all.push(all[0][..7].to_vec());
    all
}

/// A word of each kind; send buffer and room; a ring's place, and a piece of it.
pub(super) fn words() -> Vec<Vec<u8>> {
    let e = Epoch::new(70_000);
    let states = [
        TxWord::new(e, tx::ENDED).raw(),
        RxWord::new(e, rx::READY | rx::PAST).raw(),
    ];
    let rest = |state: u64, log2: u32| {
        let loc = Loc {
            chunk: 1,
            page: 5,
            log2,
        };
        let mut b = state.to_le_bytes().to_vec();
        b.extend([70_001u32, 1 << 16, 3].map(u32::to_le_bytes).concat());
        b.extend(loc.word().raw().to_le_bytes());
        b.extend(5000u64.to_le_bytes());
        b.extend([4000u32, 1 << 20].map(u32::to_le_bytes).concat());
        b
    };
    vec![rest(states[0], 12), rest(states[1], 22)]
}

/// Records as `area` takes them: bytes both ways, a direction that goes down, one that is revoked; a head, a cursor and a
/// state that the peer has not reached, bytes on its ring and on TCP.
pub(super) fn area() -> Vec<Vec<u8>> {
    let quiet = [
        &[0u8, 0, 0x88, 0x13, 1][..], // end 0 sends 5000 bytes
        &[0x80, 2, 0x88, 0x13, 4],    // end 1 receives
        &[0x80, 0, 0xff, 0, 1],
        &[0, 2, 0, 1, 4],
        &[0, 7],
        &[0x80, 9],
        &[0, 4, 0xff, 0x0f],
        &[0x80, 2, 0x88, 0x13, 4],
    ]
    .concat();
    let scribbles = [
        &[0x42u8, 0, 9, 1, 0, 16, 0, 0][..], // a head
        &[0x41, 4, 10, 0x10, 0],             // a cursor
        &[0x40, 0, 0, 4, 2, 3],              // a state
        &[0x43, 7, 0, 0, 6, 0, 4, 1, 2, 3, 4],
        &[0x40, 9, 3, 1, 2, 3],
        &[0x40, 10, 1, 1, 0, 16, 0, 0],
        &[0x40, 11],
    ];
    let mut all = vec![quiet.clone()];
    all.extend(scribbles.iter().map(|s| [*s, &quiet].concat()));
    all.push([&scribbles.concat(), &quiet[..], &quiet].concat());
    all
}
