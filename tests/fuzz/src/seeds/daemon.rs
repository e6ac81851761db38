//! For the decoders in the daemon's own crate.

use super::in_pieces;
use bytes::BytesMut;
use lane::family::{flag, state, Conn, Header, MAGIC};
use std::mem::size_of;
use std::sync::atomic::Ordering::Relaxed;
use underpass_rdma::engine::Control;
use underpassd::nodes::peers::msg::{Claim, CloseReason, Msg, MIN_VERSION, VERSION};

pub(super) fn config() -> Vec<Vec<u8>> {
    let all = [
        "ring_log2 = 12\nring_max_log2 = 20\ncredits = 4\n[limits]\nlanes = 7\n[exclude]\nports = [22]\n\
         addresses = ['10.0.0.1']\nprograms = ['sshd']\n[lanes]\nprobe_s = 5\n",
        "[node]\nname = 'a'\ncontrol = '10.0.0.1:7471'\naddresses = ['10.0.0.0/24']\n[[peer]]\nname = 'b'\n\
         control = '[fd00::2]:7471'\naddresses = ['fd00::/64', '10.0.1.2']\n[tls]\nkey = '/k'\n",
        "[metrics]\nlisten = '127.0.0.1:7479'\nper_pod = 'pod'\npods_max = 9\n[[rail]]\ndevice = 'mlx5_0'\n\
         port = 1\nfabric = 2\noff = true\n",
        "[kubernetes]\napi = true\nnode = 'a'\nnodes = true\nca = 'c'\n",
    ];
    all.map(|t| t.as_bytes().to_vec()).to_vec()
}

fn messages() -> Vec<Msg> {
    let (local, peer) = (([10, 0, 0, 1], 80).into(), ([10, 0, 0, 2], 81).into());
    let claim = Claim {
        proof: Some([7; 32]),
        local,
        peer,
        age_ms: 8,
        active: true,
        sent: 1,
        acked: 2,
        received: 3,
    };
    let incarnation = 9;
    vec![
        Msg::Hello {
            version: VERSION,
            min_version: MIN_VERSION,
            node: "a".into(),
            incarnation,
            release: "1".into(),
            lookups: 3,
        },
        Msg::Lookup {
            id: 1,
            claim: claim.clone(),
        },
        Msg::Make {
            lookup: 1,
            make: 2,
            claim,
            refusal: 0,
        },
        Msg::Made {
            make: 2,
            refusal: 3,
        },
        Msg::Expedited { local, peer },
        Msg::Ask { local, peer },
        Msg::Engine {
            incarnation,
            control: Control::QpDead { link: 3 },
        },
        Msg::Lane {
            incarnation,
            pair: 1,
            token: 2,
            uses: 3,
            tag: 4,
        },
        Msg::close(CloseReason::Version, "no"),
    ]
}

pub(super) fn peers() -> Vec<Vec<u8>> {
    let mut whole = BytesMut::new();
    let one = |m: &Msg| {
        let mut b = BytesMut::new();
        m.encode(&mut b);
        in_pieces(0, &b)
    };
    let mut all: Vec<_> = messages().iter().map(one).collect();
    messages().iter().for_each(|m| m.encode(&mut whole));
    all.push(in_pieces(11, &whole));
    all
}

/// The memory of a value that consists of atomic integers, as the target has it, after `fill` has stored what differs from
/// zero.
///
/// # Safety
/// Zeros must be a valid value.
unsafe fn bytes<T>(fill: impl FnOnce(&T)) -> Vec<u8> {
    let layout = std::alloc::Layout::new::<T>();
    // SAFETY: the memory has the value's size and alignment, and all of it, padding too, is initialised; by the caller
    // it is a value. It is given back as it was got, when nobody refers to it.
    unsafe {
        let p = std::alloc::alloc_zeroed(layout);
        assert!(!p.is_null());
        fill(&*p.cast());
        let b = std::slice::from_raw_parts(p, size_of::<T>()).to_vec();
        std::alloc::dealloc(p, layout);
        b
    }
}

pub(super) fn table() -> Vec<Vec<u8>> {
    // SAFETY: atomic integers.
    let header = unsafe {
        bytes(|h: &Header| {
            h.magic.store(MAGIC, Relaxed);
            h.version.store(lane::VERSION.into(), Relaxed);
            h.stats.count_reset(true);
            h.set_home([1, 2, 3]);
        })
    };
    // SAFETY: the same.
    let entry = unsafe {
        bytes(|c: &Conn| {
            c.state.store(state::OPEN, Relaxed);
            c.flags.store(flag::LANE | flag::NAMED, Relaxed);
            c.inode.store(7, Relaxed);
            c.holders[0].store(42, Relaxed);
            c.local.store([1; 16], 2, 80);
        })
    };
    vec![[&header[..], &[5], &entry].concat()]
}
