//! Between a daemon and tools, the container runtime, and other nodes' queue pairs.

use super::in_pieces;
use bytes::BytesMut;
use lane::abi::{rx, tx, Cursor, Epoch, TcpPos};
use prost::Message as _;
use underpass_admin::capture::Captured;
use underpass_admin::{Request, Response, Row, Stats, Target};
use underpass_nri::frames::{put, Frame, PLUGIN, REQUEST, RESPONSE, RUNTIME};
use underpass_nri::messages as nri;
use underpass_rdma::wire::{flag, Body, Cdc, Key, LinkEnd, Message, Place};

fn pair() -> Target {
    Target::Pair {
        local: "10.0.0.1:80".into(),
        peer: "[fd00::1]:4711".into(),
    }
}

fn json(m: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(m).unwrap_or_default()
}

pub(super) fn admin() -> Vec<Vec<u8>> {
    let check = Request::Check {
        local: "10.0.0.1:80".into(),
        peer: "10.0.0.2:81".into(),
    };
    let requests = [
        Request::Ss,
        Request::Keep,
        Request::Down { target: pair() },
        Request::Up {
            target: Target::Inode(7),
        },
        Request::Capture {
            target: Target::All,
        },
        check,
    ];
    let row: Option<Row> = serde_json::from_str(ROW).ok();
    let rows: Vec<Row> = row.iter().cloned().collect();
    assert_eq!(rows.len(), 1);
    let responses = [
        Response::Ss { rows },
        Response::Stats {
            stats: Box::new(Stats::default()),
        },
        Response::Told { ends: 2, later: 1 },
        Response::Check {
            local: row,
            peer: None,
            verdict: "through shared memory".into(),
            across: Some(Default::default()),
        },
        Response::Pods {
            rows: vec![Default::default()],
            runtime: "containerd".into(),
        },
        Response::Peers {
            node: Default::default(),
            peers: vec![Default::default()],
            refused: Vec::new(),
        },
        Response::Error {
            message: "no \u{1b} such".into(),
        },
    ];
    requests
        .iter()
        .map(json)
        .chain(responses.iter().map(json))
        .collect()
}

const ROW: &str = include_str!("row.json");

pub(super) fn capture() -> Vec<Vec<u8>> {
    let state = Captured::State {
        lane: true,
        remote: true,
        up: [true, false],
        firsts: [Some(u32::MAX), None],
    };
    let bytes = Captured::Bytes {
        from: 1,
        ns: 7,
        at: 8,
        acked: 9,
        lost: 10,
        len: 3,
    };
    let end = Captured::End {
        why: "a\nb".into(),
        unread: 5,
    };
    let mut stream = Vec::new();
    state.encode(b"", &mut stream);
    bytes.encode(b"\n{\n", &mut stream);
    end.encode(b"", &mut stream);
    vec![in_pieces(0, &stream), in_pieces(9, &stream)]
}

pub(super) fn nri() -> Vec<Vec<u8>> {
    let pod = nri::PodSandbox {
        id: "1".into(),
        name: "p".into(),
        uid: "u".into(),
        namespace: "default".into(),
        annotations: [("underpass.io/inject".to_string(), "true".to_string())].into(),
        handler: String::new(),
    };
    let container = nri::Container {
        id: "2".into(),
        pod: "1".into(),
        name: "c".into(),
        env: vec!["A=b".into()],
        mounts: vec![nri::Mount {
            destination: "/x".into(),
            kind: "bind".into(),
            source: "/y".into(),
            options: vec!["ro".into()],
        }],
    };
    let synchronize = nri::Synchronize {
        pods: vec![pod.clone()],
        containers: vec![container.clone()],
        more: true,
    };
    let create = nri::CreateContainer {
        pod: Some(pod),
        container: Some(container),
    };
    let payloads = [
        ("Synchronize", synchronize.encode_to_vec()),
        ("CreateContainer", create.encode_to_vec()),
    ];
    let mut stream = BytesMut::new();
    for (method, payload) in payloads {
        let request = nri::Request {
            service: "nri.pkg.api.v1alpha1.Plugin".into(),
            method: method.into(),
            payload: payload.into(),
        };
        let frame = Frame {
            connection: PLUGIN,
            call: 1,
            kind: REQUEST,
            payload: request.encode_to_vec().into(),
        };
        put(&mut stream, &frame);
    }
    let answer = nri::Response {
        status: Some(nri::Status {
            code: nri::UNIMPLEMENTED,
            message: "no".into(),
        }),
        payload: Default::default(),
    };
    let frame = Frame {
        connection: RUNTIME,
        call: 1,
        kind: RESPONSE,
        payload: answer.encode_to_vec().into(),
    };
    put(&mut stream, &frame);
    vec![in_pieces(0, &stream), in_pieces(50, &stream)]
}

fn snapshot(epoch: Epoch, cursor: Cursor) -> Body {
    Body::Cdc(Cdc {
        head: cursor,
        cursor,
        tx_epoch: epoch,
        tx_phase: tx::UP,
        rx_epoch: epoch,
        rx_flags: rx::READY,
        flags: flag::WANT_SPACE | flag::VALIDATE,
        moves: 1,
        acked_moves: 1,
    })
}

pub(super) fn queue() -> Vec<Vec<u8>> {
    let end = LinkEnd {
        link: 5,
        fabric: 1,
        gid: [0xfe; 16],
        lid: 0,
        qpn: 70,
        psn: 80,
        mtu: 3,
        depth: 128,
    };
    let (epoch, cursor) = (Epoch::new(3), Cursor::new(70_000));
    let snapshot = snapshot(epoch, cursor);
    let key = Key {
        addr: 1 << 40,
        len: 4 << 20,
        rkey: 77,
    };
    let place = Place {
        region: 1,
        offset: 4096,
    };
    let bodies = [
        Body::ConfirmLink { reply: true },
        Body::AddLink {
            reply: false,
            end: Some(end),
        },
        Body::DeleteLink { reply: false },
        Body::ConfirmRkey(Some(key)),
        Body::ConfirmRkey(None),
        Body::TestLink { reply: true },
        Body::DeleteRkey { reply: true },
        snapshot,
        Body::Switch {
            epoch,
            attempt: 1,
            tcp_pos: TcpPos::new(100),
            start: cursor,
        },
        Body::SwitchReply {
            epoch,
            attempt: 1,
            ok: true,
        },
        Body::Ring {
            moves: 1,
            log2: 16,
            from: cursor,
        },
        Body::RingReply {
            moves: 1,
            place: Some(place),
        },
        Body::Landed {
            epoch,
            head: cursor,
        },
    ];
    let encode = |body| {
        let m = Message {
            seq: 1,
            token: 5,
            credits: 9,
            body,
        };
        m.encode().to_vec()
    };
    let mut all: Vec<_> = bodies.into_iter().map(encode).collect();
    all.push([&encode(snapshot)[..], b"data"].concat());
    all
}

/// No lies; and all kinds of them, early and late.
pub(super) fn engine() -> Vec<Vec<u8>> {
    let some = |(seed, len): (u64, usize)| {
        let mut rng = underpass_rdma::sim::Rng(seed);
        (0..len).map(|_| rng.below(0x100) as u8).collect()
    };
    let mut all = vec![vec![1; 600]];
    all.extend([(1, 60), (2, 300), (3, 1000), (4, 4000)].map(some));
    all
}
