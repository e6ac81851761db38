//! For the decoders in the daemon's own crate.

use super::in_pieces;
use bytes::BytesMut;
use lane::family::{flag, state, Conn, Header, MAGIC};
use serde_json::json;
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

pub(super) fn rule() -> Vec<Vec<u8>> {
    let all = [
        r#"[{"action":"allow","uids":[1],"ports":[80,6379]},{"addresses":["10.0.0.0/8","fd00::1"]}]"#,
        r#"[{"action":"deny","programs":["a","sshd"],"namespaces":["n"]},{"action":"allow"},{}]"#,
        r#"[{"addresses":["10.0.0.1/8"]}]"#,
        r#"[{"prots":[1]}]"#,
    ];
    all.map(|t| t.as_bytes().to_vec()).to_vec()
}

pub(super) fn proc() -> Vec<Vec<u8>> {
    let uid = "0123abcd-0123-0123-0123-0123456789ab";
    let two = "29 23 0:26 / / rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    let one = "35 31 0:32 /docker/x /usr rw - cgroup cgroup rw,memory\n";
    let all = [
        format!("{two}\x000::/usr/lib/a.service/b\n"),
        format!("{two}{one}\x004:cpu:/\n5:cpuacct,memory:/docker/x/lib/y\n0::/\n"),
        format!("\x005:memory:/kubepods/burstable/pod{uid}/c1\n"),
        format!("{two}\x000::/../../usr/user-1000.slice/x\n"),
    ];
    all.map(String::into_bytes).to_vec()
}

/// A pod's review, behind what is configured.
pub(super) fn review() -> Vec<Vec<u8>> {
    let review = |pod: serde_json::Value| {
        let body = json!({
            "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
            "request": {
                "uid": "705ab4f5", "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "namespace": "shop", "operation": "CREATE", "object": pod,
            },
        });
        body.to_string()
    };
    let asks = json!({"underpass.io/enabled": "true", "underpass.io/containers": "c"});
    let plain = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}});
    let more = json!({
        "metadata": {"generateName": "p-", "annotations": asks},
        "spec": {
            "runtimeClassName": "runc", "nodeSelector": {"kubernetes.io/os": "linux"},
            "volumes": [{"name": "underpass", "emptyDir": {}}],
            "initContainers": [{"name": "i", "restartPolicy": "Always", "volumeMounts": []}],
            "containers": [
                {"name": "c", "env": [{"name": "LD_PRELOAD", "value": "/x.so"}, {"name": "A", "valueFrom": {}}]},
                {"name": "d", "volumeMounts": [{"name": "v", "mountPath": "/run/underpass"}]},
            ],
        },
    });
    let annotated = json!({
        "metadata": {"name": "p", "annotations": {"underpass.io/enabled": "true"}},
        "spec": {
            "volumes": [{"name": "v", "csi": {"driver": "csi.underpass.io", "readOnly": true}}],
            "containers": [{"name": "c", "env": null}],
        },
    });
    let all = [(1, plain.clone()), (4, plain), (0, more), (0, annotated)];
    all.map(|(how, pod)| [&[how], review(pod).as_bytes()].concat())
        .to_vec()
}

/// Which pod there is, a request as the API has it, and what is to be signed.
pub(super) fn csr() -> Vec<Vec<u8>> {
    const PEM: &str = include_str!("csr.pem");
    let bound = |more: serde_json::Value| {
        let mut extra = json!({
            "authentication.kubernetes.io/pod-name": ["p"],
            "authentication.kubernetes.io/pod-uid": ["u"],
        });
        extra["authentication.kubernetes.io/node-name"] = more;
        let request = json!({
            "metadata": {"name": "r"},
            "spec": {
                "request": "", "signerName": "underpass.io/node", "usages": ["digital signature"],
                "username": "system:serviceaccount:sys:underpass", "extra": extra,
            },
            "status": {"conditions": [{"type": "Approved", "status": "True"}]},
        });
        request.to_string()
    };
    let whole = |how: u8, request: String, pem: &str| {
        let len = (request.len() as u16).to_le_bytes();
        [&[how][..], &len, request.as_bytes(), pem.as_bytes()].concat()
    };
    vec![
        whole(1, bound(json!(["a"])), PEM),
        whole(0, bound(json!(["a"])), PEM),
        whole(5, bound(json!([])), PEM),
        whole(
            1,
            bound(json!(["b"])),
            "-----BEGIN CERTIFICATE REQUEST-----\nMAA=\n",
        ),
    ]
}

/// Limits; two clients get a lane and a further chunk, give the lane back, and die. A third refuses.
pub(super) fn groups() -> Vec<Vec<u8>> {
    let set_up = [
        &[15u8, 15][..],
        &[0, 0, 0, 1, 0], // connect
        &[2, 0, 0, 0, 0], // each seals its first file,
        &[2, 1, 1, 0, 0],
        &[4, 0, 0, 0, 0], // and has mapped it
        &[4, 1, 1, 0, 0],
    ]
    .concat();
    let grow = [
        &[7u8, 0, 0, 0, 0][..],
        &[2, 0, 0, 0, 2],
        &[4, 0, 0, 0, 2],
        &[6, 1, 1, 0, 2],
    ]
    .concat();
    let done = [&[8u8, 0, 0, 0, 0][..], &[8, 1, 1, 0, 0]].concat();
    let fails = [
        &[0u8, 0, 1, 2, 0][..],
        &[10, 2, 1, 1, 0],
        &[14, 200],
        &[0, 0, 2, 2, 1],
    ]
    .concat();
    let dies = [&[12u8, 1][..], &[9, 1, 1, 0, 0], &[13, 1, 0], &[15]].concat();
    vec![
        [&set_up[..], &grow, &done, &[12, 0, 12, 2]].concat(),
        [&set_up[..], &fails, &[11, 0, 0, 0, 11, 1, 0, 1]].concat(),
        [&set_up[..], &grow, &dies].concat(),
    ]
}
