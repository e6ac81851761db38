//! Numbers of libibverbs to and from our own types. Values that are not known become `Other`:
//! library and kernel may be newer than the headers.

use rdma_sys::*;
use std::ffi::c_int;
use underpass_rdma::verbs::*;

pub fn error(errno: i32) -> Error {
    match errno {
        libc::ENODEV | libc::ENXIO | libc::EIO => Error::NoDevice,
        libc::ENOMEM | libc::ENOSPC => Error::NoMemory,
        libc::EINVAL => Error::Invalid,
        libc::EPERM | libc::EACCES => Error::Permission,
        libc::EOPNOTSUPP | libc::ENOSYS => Error::Unsupported,
        e => Error::Os(e),
    }
}

/// What the last library call left in errno.
pub fn last_error() -> Error {
    error(last_errno())
}

pub fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The library answers 0, an error number, or -1 and errno; some drivers the negative number.
pub fn check(ret: c_int) -> Result<(), Error> {
    match ret {
        0 => Ok(()),
        -1 => Err(last_error()),
        r => Err(error(r.saturating_abs())),
    }
}

/// The same for posting, where "no memory" means that the queue is full.
pub fn check_post(ret: c_int) -> Result<(), Error> {
    check(ret).map_err(|e| match e {
        Error::NoMemory => Error::Full,
        e => e,
    })
}

pub fn mtu(m: Mtu) -> ibv_mtu::Type {
    m as ibv_mtu::Type + ibv_mtu::IBV_MTU_256
}

pub fn mtu_from(m: ibv_mtu::Type) -> Option<Mtu> {
    Mtu::ALL
        .get((m as usize).checked_sub(ibv_mtu::IBV_MTU_256 as usize)?)
        .copied()
}

pub fn access(a: Access) -> c_int {
    let bits = match a {
        Access::LocalRead => return 0,
        Access::LocalWrite => ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
        Access::RemoteWrite => {
            ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
        }
    };
    bits.cast_signed()
}

pub fn qp_state(s: ibv_qp_state::Type) -> QpState {
    match s {
        ibv_qp_state::IBV_QPS_RESET => QpState::Reset,
        ibv_qp_state::IBV_QPS_INIT => QpState::Init,
        ibv_qp_state::IBV_QPS_RTR => QpState::Rtr,
        ibv_qp_state::IBV_QPS_RTS => QpState::Rts,
        ibv_qp_state::IBV_QPS_SQD | ibv_qp_state::IBV_QPS_SQE => QpState::Draining,
        _ => QpState::Error,
    }
}

fn status(s: ibv_wc_status::Type) -> Status {
    use ibv_wc_status::*;
    match s {
        IBV_WC_SUCCESS => Status::Success,
        IBV_WC_WR_FLUSH_ERR => Status::Flushed,
        IBV_WC_RETRY_EXC_ERR => Status::RetryExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => Status::RnrRetryExceeded,
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => Status::LocalProtection,
        IBV_WC_LOC_LEN_ERR => Status::LocalLength,
        IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
        IBV_WC_REM_INV_REQ_ERR => Status::RemoteInvalid,
        IBV_WC_REM_OP_ERR => Status::RemoteOperation,
        _ => Status::Other,
    }
}

fn opcode(o: ibv_wc_opcode::Type) -> Opcode {
    match o {
        ibv_wc_opcode::IBV_WC_SEND => Opcode::Send,
        ibv_wc_opcode::IBV_WC_RDMA_WRITE => Opcode::Write,
        ibv_wc_opcode::IBV_WC_RECV => Opcode::Recv,
        ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => Opcode::RecvWriteImm,
        _ => Opcode::Other,
    }
}

pub fn completion(wc: &ibv_wc) -> Completion {
    let status = status(wc.status);
    let good = status == Status::Success;
    let with_imm = good && wc.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
    Completion {
        wr_id: wc.wr_id,
        status,
        vendor: wc.vendor_err,
        opcode: if good {
            opcode(wc.opcode)
        } else {
            Opcode::Other
        },
        bytes: if good { wc.byte_len } else { 0 },
        // SAFETY: both members of the union are plain 32-bit numbers, valid with any bits.
        imm: with_imm.then(|| u32::from_be(unsafe { wc.imm_data_invalidated_rkey_union.imm_data })),
        qpn: wc.qp_num,
    }
}

/// The type of a GID as the kernel numbers it; it has one number for InfiniBand and RoCE v1 in places.
pub fn gid_kind(kind: u32, layer: LinkLayer) -> GidKind {
    match (kind, layer) {
        (IBV_GID_TYPE_ROCE_V2, _) => GidKind::RoceV2,
        (0 | IBV_GID_TYPE_ROCE_V1, LinkLayer::Ethernet) => GidKind::RoceV1,
        (0, LinkLayer::InfiniBand) => GidKind::InfiniBand,
        _ => GidKind::Other,
    }
}

/// What an asynchronous event is about: `element` is a port's number or, for events of a queue
/// pair, its number, which the caller has looked up.
pub fn event(kind: u32, element: u32) -> DeviceEvent {
    use ibv_event_type as E;
    let port = u8::try_from(element).unwrap_or(0);
    let is = |e: E| kind == e as u32;
    if is(E::IBV_EVENT_PORT_ACTIVE) {
        DeviceEvent::PortUp(port)
    } else if is(E::IBV_EVENT_PORT_ERR) {
        DeviceEvent::PortDown(port)
    } else if is(E::IBV_EVENT_GID_CHANGE) {
        DeviceEvent::GidChange(port)
    } else if is(E::IBV_EVENT_LID_CHANGE)
        || is(E::IBV_EVENT_PKEY_CHANGE)
        || is(E::IBV_EVENT_SM_CHANGE)
        || is(E::IBV_EVENT_CLIENT_REREGISTER)
    {
        DeviceEvent::PortChange(port)
    } else if is(E::IBV_EVENT_DEVICE_FATAL) {
        DeviceEvent::Removed
    } else if is_qp_error(kind) {
        DeviceEvent::QpError(element)
    } else if is(E::IBV_EVENT_CQ_ERR) {
        DeviceEvent::CqError
    } else {
        DeviceEvent::Other
    }
}

/// Whether the event's element points to a queue pair that has failed.
pub fn is_qp_error(kind: u32) -> bool {
    use ibv_event_type as E;
    kind == E::IBV_EVENT_QP_FATAL as u32
        || kind == E::IBV_EVENT_QP_REQ_ERR as u32
        || kind == E::IBV_EVENT_QP_ACCESS_ERR as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(libc::EINVAL), Err(Error::Invalid));
        assert_eq!(check(-libc::EINVAL), Err(Error::Invalid));
        assert_eq!(check(libc::EIO), Err(Error::NoDevice));
        assert_eq!(check(libc::EBUSY), Err(Error::Os(libc::EBUSY)));
        assert_eq!(check_post(libc::ENOMEM), Err(Error::Full));
        assert_eq!(check(libc::ENOMEM), Err(Error::NoMemory));
        assert_eq!(check(i32::MIN), Err(Error::Os(i32::MAX)));
        // Leaves ENOTDIR in errno.
        std::fs::metadata("/dev/null/nothing").unwrap_err();
        assert_eq!(check(-1), Err(Error::Os(libc::ENOTDIR)));
    }

    #[test]
    fn mtus_both_ways() {
        for m in Mtu::ALL {
            assert_eq!(mtu_from(mtu(m)), Some(m));
        }
        assert_eq!(mtu(Mtu::B4096), ibv_mtu::IBV_MTU_4096);
        assert_eq!(mtu_from(0), None);
        assert_eq!(mtu_from(6), None);
    }

    #[test]
    fn gid_kinds() {
        use LinkLayer::{Ethernet, InfiniBand};
        assert_eq!(gid_kind(2, Ethernet), GidKind::RoceV2);
        assert_eq!(gid_kind(1, Ethernet), GidKind::RoceV1);
        assert_eq!(gid_kind(0, Ethernet), GidKind::RoceV1);
        assert_eq!(gid_kind(0, InfiniBand), GidKind::InfiniBand);
        assert_eq!(gid_kind(9, InfiniBand), GidKind::Other);
    }

    #[test]
    fn events() {
        assert_eq!(event(9, 1), DeviceEvent::PortUp(1));
        assert_eq!(event(10, 2), DeviceEvent::PortDown(2));
        assert_eq!(event(18, 1), DeviceEvent::GidChange(1));
        assert_eq!(event(8, 0), DeviceEvent::Removed);
        assert_eq!(event(3, 0x1234), DeviceEvent::QpError(0x1234));
        assert_eq!(event(11, 1), DeviceEvent::PortChange(1));
        assert_eq!(event(1000, 7), DeviceEvent::Other);
    }

    #[test]
    fn errors_of_work_hide_what_is_not_defined() {
        // SAFETY: numbers only; all zero is valid.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        wc.wr_id = 7;
        wc.byte_len = 44;
        wc.opcode = ibv_wc_opcode::IBV_WC_RECV;
        wc.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
        wc.imm_data_invalidated_rkey_union.imm_data = 5u32.to_be();
        let good = completion(&wc);
        assert_eq!(
            (good.opcode, good.bytes, good.imm),
            (Opcode::Recv, 44, Some(5))
        );
        wc.status = ibv_wc_status::IBV_WC_RETRY_EXC_ERR;
        let bad = completion(&wc);
        assert_eq!((bad.status, bad.wr_id), (Status::RetryExceeded, 7));
        assert_eq!((bad.opcode, bad.bytes, bad.imm), (Opcode::Other, 0, None));
        wc.status = 77;
        assert_eq!(completion(&wc).status, Status::Other);
    }
}
