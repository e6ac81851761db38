//! Queue pairs.

use super::cm::Connection;
use super::completion::{Cq, CqInner, BATCH};
use super::convert::{check, check_post, last_error, mtu, qp_state};
use super::last::{free, Last};
use super::memory::Domain;
use rdma_sys::*;
use std::mem::{zeroed, ManuallyDrop};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::verbs::*;

pub struct Qp {
    raw: NonNull<ibv_qp>,
    qpn: u32,
    caps: QpCaps,
    domain: Arc<Domain>,
    /// Only held so that they outlive the queue pair.
    queues: [Arc<CqInner>; 2],
    /// With iWARP.
    connection: Option<Connection>,
}

// SAFETY: see `Context`.
unsafe impl Send for Qp {}
// SAFETY: see `Context`.
unsafe impl Sync for Qp {}

impl Qp {
    pub(super) fn create(
        domain: Arc<Domain>,
        send: &Cq,
        recv: &Cq,
        caps: QpCaps,
    ) -> Result<Qp, Error> {
        let c = &domain.context;
        if !send.is_of(c) || !recv.is_of(c) {
            return Err(Error::Invalid);
        }
        let connection = c.iwarp.then(Connection::new).transpose()?;
        // SAFETY: pointers and numbers only.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        init.send_cq = send.0.raw.as_ptr();
        init.recv_cq = recv.0.raw.as_ptr();
        init.cap.max_send_wr = caps.send_requests;
        init.cap.max_recv_wr = caps.recv_buffers;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init.cap.max_inline_data = caps.inline_bytes;
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        // SAFETY: a living protection domain and queues of the same device.
        let raw = unsafe { (c.lib.ibv_create_qp)(domain.raw.as_ptr(), &mut init) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        c.counts.qps.fetch_add(1, Relaxed);
        Ok(Qp {
            raw,
            // SAFETY: the library has just made it; its number never changes.
            qpn: unsafe { (*raw.as_ptr()).qp_num },
            caps: QpCaps {
                send_requests: init.cap.max_send_wr,
                recv_buffers: init.cap.max_recv_wr,
                inline_bytes: init.cap.max_inline_data,
            },
            domain,
            queues: [send.0.clone(), recv.0.clone()],
            connection,
        })
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: as for `Cq::ops`.
        unsafe { &(*self.domain.context.raw.as_ptr()).ops }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, which: &[ibv_qp_attr_mask]) -> Result<(), Error> {
        let mask = which.iter().fold(0, |m, w| m | w.0);
        // SAFETY: a living queue pair.
        check(unsafe {
            (self.domain.context.lib.ibv_modify_qp)(self.raw.as_ptr(), attr, mask.cast_signed())
        })
    }

    /// Nothing else is done with the queue pair after this.
    fn free(&mut self) -> Result<(), Error> {
        let Some(connection) = self.connection.take() else {
            // SAFETY: created by us; called once, by `drop` or by `destroy`, which prevents `drop`.
            return unsafe { free(self.raw, &self.domain) };
        };
        let aside = connection.under_way();
        let safe = !aside || self.to_error().is_ok();
        let (domain, queues) = (self.domain.clone(), self.queues.clone());
        // SAFETY: as above.
        let mut last = unsafe { Last::new(self.raw, connection, queues, domain) };
        if !aside {
            return last.free();
        }
        // It would wait for the peer. As a queue pair in error it cannot be connected any more, and
        // nothing can land through it: what is left to do may take its time. (Without a thread, the
        // closure is dropped here.)
        let name = "iwarp-end".to_owned();
        let _ = std::thread::Builder::new()
            .name(name)
            .spawn(move || drop(last));
        match safe {
            true => Ok(()),
            false => Err(Error::Invalid),
        }
    }
}

/// All zero: what a mask does not name is not looked at.
fn no_attributes() -> ibv_qp_attr {
    // SAFETY: numbers only, and unions of numbers.
    unsafe { zeroed() }
}

type M = ibv_qp_attr_mask;

impl QueuePair for Qp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn to_init(&self, port: u8) -> Result<(), Error> {
        let mut a = no_attributes();
        a.qp_state = ibv_qp_state::IBV_QPS_INIT;
        if self.connection.is_some() {
            // As librdmacm has it. (Reading is for devices that begin with an empty read; no memory
            // of ours can be read.)
            a.qp_access_flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
                | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
                | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
            return self.modify(&mut a, &[M::IBV_QP_STATE, M::IBV_QP_ACCESS_FLAGS]);
        }
        a.pkey_index = 0;
        a.port_num = port;
        a.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        self.modify(
            &mut a,
            &[
                M::IBV_QP_STATE,
                M::IBV_QP_PKEY_INDEX,
                M::IBV_QP_PORT,
                M::IBV_QP_ACCESS_FLAGS,
            ],
        )
    }

    fn to_rtr(&self, attr: &RtrAttr) -> Result<(), Error> {
        if let Some(c) = &self.connection {
            return c.to_rtr(attr.remote, attr.local);
        }
        let mut a = no_attributes();
        a.qp_state = ibv_qp_state::IBV_QPS_RTR;
        a.path_mtu = mtu(attr.mtu);
        a.dest_qp_num = attr.remote.qpn;
        a.rq_psn = attr.remote.psn & 0xff_ffff;
        a.max_dest_rd_atomic = 0;
        a.min_rnr_timer = attr.min_rnr_timer;
        a.ah_attr.dlid = attr.remote.lid;
        a.ah_attr.sl = attr.service_level;
        a.ah_attr.port_num = attr.port;
        if attr.global {
            a.ah_attr.is_global = 1;
            a.ah_attr.grh.dgid.raw = attr.remote.gid.0;
            a.ah_attr.grh.sgid_index =
                u8::try_from(attr.gid_index).map_err(|_| Error::Unsupported)?;
            a.ah_attr.grh.hop_limit = attr.hop_limit;
            a.ah_attr.grh.traffic_class = attr.traffic_class;
        }
        self.modify(
            &mut a,
            &[
                M::IBV_QP_STATE,
                M::IBV_QP_AV,
                M::IBV_QP_PATH_MTU,
                M::IBV_QP_DEST_QPN,
                M::IBV_QP_RQ_PSN,
                M::IBV_QP_MAX_DEST_RD_ATOMIC,
                M::IBV_QP_MIN_RNR_TIMER,
            ],
        )
    }

    fn to_rts(&self, attr: &RtsAttr) -> Result<(), Error> {
        if let Some(c) = &self.connection {
            return c.to_rts(attr.psn);
        }
        let mut a = no_attributes();
        a.qp_state = ibv_qp_state::IBV_QPS_RTS;
        a.sq_psn = attr.psn & 0xff_ffff;
        a.timeout = attr.timeout;
        a.retry_cnt = attr.retry_count;
        a.rnr_retry = attr.rnr_retry;
        a.max_rd_atomic = 0;
        self.modify(
            &mut a,
            &[
                M::IBV_QP_STATE,
                M::IBV_QP_SQ_PSN,
                M::IBV_QP_TIMEOUT,
                M::IBV_QP_RETRY_CNT,
                M::IBV_QP_RNR_RETRY,
                M::IBV_QP_MAX_QP_RD_ATOMIC,
            ],
        )
    }

    fn to_error(&self) -> Result<(), Error> {
        let mut a = no_attributes();
        a.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify(&mut a, &[M::IBV_QP_STATE])
    }

    fn listen(&self, address: Gid) -> Result<u16, Error> {
        let c = self.connection.as_ref();
        c.map_or(Ok(0), |c| c.listen(&self.domain.context, address))
    }

    fn connected(&self) -> Result<bool, Error> {
        let c = self.connection.as_ref();
        c.map_or(Ok(true), |c| c.connected(&self.domain.context, self.qpn))
    }

    fn acknowledges(&self) -> bool {
        self.connection.is_none()
    }

    fn state(&self) -> Result<QpState, Error> {
        let mut a = no_attributes();
        // SAFETY: pointers and numbers only.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        let mask = M::IBV_QP_STATE.0.cast_signed();
        // SAFETY: a living queue pair, and room for the answers.
        check(unsafe {
            (self.domain.context.lib.ibv_query_qp)(self.raw.as_ptr(), &mut a, mask, &mut init)
        })?;
        Ok(qp_state(a.qp_state))
    }

    fn post_send(&self, requests: &[Request<'_>]) -> Result<(), PostError> {
        let fail = |accepted, error| Err(PostError { accepted, error });
        let Some(post) = self.ops().post_send else {
            return fail(0, Error::Unsupported);
        };
        let mut accepted = 0;
        for batch in requests.chunks(BATCH) {
            // SAFETY: pointers, numbers, and unions of these.
            let mut wrs: [ibv_send_wr; BATCH] = unsafe { zeroed() };
            // SAFETY: numbers only.
            let mut sges: [ibv_sge; BATCH] = unsafe { zeroed() };
            let mut good = 0;
            for (r, (wr, sge)) in batch.iter().zip(wrs.iter_mut().zip(&mut sges)) {
                if !fill(r, self.caps.inline_bytes, wr, sge) {
                    break;
                }
                good += 1;
            }
            for i in 0..good {
                wrs[i].sg_list = &mut sges[i];
                wrs[i].next = if i + 1 < good {
                    &mut wrs[i + 1]
                } else {
                    null_mut()
                };
            }
            if good > 0 {
                let mut bad = null_mut();
                // SAFETY: a living queue pair; a list of `good` requests, whose pieces are either
                // checked by the device against their keys or, inline, slices that we borrow.
                let ret = unsafe { post(self.raw.as_ptr(), &mut wrs[0], &mut bad) };
                if let Err(e) = check_post(ret) {
                    let n = wrs[..good].iter().position(|w| std::ptr::eq(w, bad));
                    return fail(accepted + n.unwrap_or(0), e);
                }
            }
            accepted += good;
            if good < batch.len() {
                return fail(accepted, Error::Invalid);
            }
        }
        Ok(())
    }

    fn post_recv(&self, buffers: &[RecvBuffer]) -> Result<(), PostError> {
        let fail = |accepted, error| Err(PostError { accepted, error });
        let Some(post) = self.ops().post_recv else {
            return fail(0, Error::Unsupported);
        };
        let mut accepted = 0;
        for batch in buffers.chunks(BATCH) {
            // SAFETY: pointers and numbers only.
            let mut wrs: [ibv_recv_wr; BATCH] = unsafe { zeroed() };
            // SAFETY: numbers only.
            let mut sges: [ibv_sge; BATCH] = unsafe { zeroed() };
            for (i, b) in batch.iter().enumerate() {
                sges[i] = raw_sge(&b.buffer);
                wrs[i].wr_id = b.wr_id;
                wrs[i].sg_list = &mut sges[i];
                wrs[i].num_sge = 1;
                let more = i + 1 < batch.len();
                wrs[i].next = if more { &mut wrs[i + 1] } else { null_mut() };
            }
            let mut bad = null_mut();
            // SAFETY: a living queue pair; a list of requests whose keys the device checks.
            let ret = unsafe { post(self.raw.as_ptr(), &mut wrs[0], &mut bad) };
            if let Err(e) = check_post(ret) {
                let n = wrs[..batch.len()].iter().position(|w| std::ptr::eq(w, bad));
                return fail(accepted + n.unwrap_or(0), e);
            }
            accepted += batch.len();
        }
        Ok(())
    }

    fn destroy(self) -> Result<(), Error> {
        let mut this = ManuallyDrop::new(self);
        let done = this.free();
        // SAFETY: `this` is never touched again, so both fields are moved out once. (`free` has taken
        // the connection.)
        unsafe {
            drop(std::ptr::read(&this.queues));
            drop(std::ptr::read(&this.domain));
        }
        done
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // A failure is counted.
        let _ = self.free();
    }
}

fn raw_sge(s: &Sge) -> ibv_sge {
    ibv_sge {
        addr: s.addr,
        length: s.len,
        lkey: s.lkey,
    }
}

/// Translates a request; false if it carries more in itself than the queue pair allows.
fn fill(r: &Request<'_>, inline_bytes: u32, wr: &mut ibv_send_wr, sge: &mut ibv_sge) -> bool {
    wr.wr_id = r.wr_id;
    wr.num_sge = 1;
    if r.signaled {
        wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    match r.op {
        Op::Write {
            local,
            remote,
            rkey,
        } => {
            *sge = raw_sge(&local);
            wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            wr.wr.rdma = rdma_t {
                remote_addr: remote,
                rkey,
            };
        }
        Op::WriteImm {
            local,
            remote,
            rkey,
            imm,
        } => {
            *sge = raw_sge(&local);
            wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
            wr.wr.rdma = rdma_t {
                remote_addr: remote,
                rkey,
            };
        }
        Op::Message(local) => {
            *sge = raw_sge(&local);
            wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
        }
        Op::Inline(bytes) => {
            let fits = |n: &u32| *n <= inline_bytes;
            let Some(length) = u32::try_from(bytes.len()).ok().filter(fits) else {
                return false;
            };
            sge.addr = bytes.as_ptr() as u64;
            sge.length = length;
            wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
            let flags = ibv_send_flags::IBV_SEND_INLINE.0 | ibv_send_flags::IBV_SEND_SOLICITED.0;
            wr.send_flags |= flags;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(op: Op<'_>, signaled: bool) -> Option<(ibv_send_wr, ibv_sge)> {
        // SAFETY: pointers, numbers, and unions of these.
        let (mut wr, mut sge) = unsafe { zeroed() };
        let r = Request {
            wr_id: 9,
            op,
            signaled,
        };
        fill(&r, 44, &mut wr, &mut sge).then_some((wr, sge))
    }

    #[test]
    fn requests() {
        let local = Sge {
            addr: 0x1000,
            len: 64,
            lkey: 3,
        };
        let (wr, sge) = filled(
            Op::Write {
                local,
                remote: 0x2000,
                rkey: 5,
            },
            true,
        )
        .unwrap();
        assert_eq!((wr.wr_id, wr.num_sge), (9, 1));
        assert_eq!(
            (wr.opcode, wr.send_flags),
            (ibv_wr_opcode::IBV_WR_RDMA_WRITE, 2)
        );
        assert_eq!((sge.addr, sge.length, sge.lkey), (0x1000, 64, 3));
        // SAFETY: written as this member.
        let rdma = unsafe { wr.wr.rdma };
        assert_eq!((rdma.remote_addr, rdma.rkey), (0x2000, 5));

        let (wr, _) = filled(Op::Message(local), false).unwrap();
        assert_eq!((wr.opcode, wr.send_flags), (ibv_wr_opcode::IBV_WR_SEND, 0));

        let bytes = [1; 45];
        let (wr, sge) = filled(Op::Inline(&bytes[..44]), false).unwrap();
        assert_eq!((wr.opcode, wr.send_flags), (ibv_wr_opcode::IBV_WR_SEND, 12));
        assert_eq!((sge.addr, sge.length), (bytes.as_ptr() as u64, 44));
        assert!(filled(Op::Inline(&bytes), true).is_none());
    }
}
