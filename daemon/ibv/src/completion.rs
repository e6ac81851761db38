//! Completion queues.

use super::convert::{check, completion, error, last_errno, last_error};
use super::device::Context;
use super::never_wait;
use rdma_sys::*;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use underpass_rdma::verbs::*;

/// Requests or completions per call of the library.
pub(super) const BATCH: usize = 16;

pub(super) struct CqInner {
    pub(super) raw: NonNull<ibv_cq>,
    channel: Channel,
}

// SAFETY: see `Context`.
unsafe impl Send for CqInner {}
// SAFETY: see `Context`.
unsafe impl Sync for CqInner {}

impl Drop for CqInner {
    fn drop(&mut self) {
        let c = &self.channel.context;
        // SAFETY: created by us, destroyed once, before its channel; queue pairs that use it held
        // this value. All its notifications were acknowledged, so this does not wait.
        let done = check(unsafe { (c.lib.ibv_destroy_cq)(self.raw.as_ptr()) });
        let _ = c.counts.freed(&c.counts.cqs, done);
    }
}

/// Where a completion queue's notifications arrive.
struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once, after its only queue. Refused while that queue could
        // not be destroyed, which is counted as stuck already.
        unsafe { (self.context.lib.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

pub struct Cq(pub(super) Arc<CqInner>);

impl Cq {
    pub(super) fn create(context: Arc<Context>, entries: u32) -> Result<Cq, Error> {
        let entries = i32::try_from(entries).map_err(|_| Error::Invalid)?;
        // SAFETY: an open context.
        let raw = unsafe { (context.lib.ibv_create_comp_channel)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        let channel = Channel { raw, context };
        // SAFETY: the channel was just made; its descriptor never changes.
        never_wait(unsafe { (*raw.as_ptr()).fd })?;
        let c = &channel.context;
        // SAFETY: an open context and a channel of it.
        let raw =
            unsafe { (c.lib.ibv_create_cq)(c.raw.as_ptr(), entries, null_mut(), raw.as_ptr(), 0) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        c.counts.cqs.fetch_add(1, Relaxed);
        Ok(Cq(Arc::new(CqInner { raw, channel })))
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.0.channel.context, context)
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open as long as we hold the queue, and its table is not written to
        // after it was opened.
        unsafe { &(*self.0.channel.context.raw.as_ptr()).ops }
    }
}

impl CompletionQueue for Cq {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        let poll = self.ops().poll_cq.ok_or(Error::Unsupported)?;
        let mut got = 0;
        while got < max {
            let mut wcs = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
            let want = BATCH.min(max - got);
            let room = i32::try_from(want).unwrap_or(i32::MAX);
            // SAFETY: a living queue, and room for `want` completions.
            let n = unsafe { poll(self.0.raw.as_ptr(), room, wcs[0].as_mut_ptr()) };
            let n = match usize::try_from(n) {
                Ok(n) => n.min(want),
                // What was taken already is told first; the error will come again.
                Err(_) if got > 0 => break,
                Err(_) => return Err(check(n).err().unwrap_or(Error::Invalid)),
            };
            for wc in &wcs[..n] {
                // SAFETY: the library has filled in the first `n`.
                out.push(completion(unsafe { wc.assume_init_ref() }));
            }
            got += n;
            if n < want {
                break;
            }
        }
        Ok(got)
    }

    fn arm(&self, messages: bool) -> Result<(), Error> {
        let arm = self.ops().req_notify_cq.ok_or(Error::Unsupported)?;
        // SAFETY: a living queue.
        check(unsafe { arm(self.0.raw.as_ptr(), i32::from(messages)) })
    }

    fn take_notification(&self) -> Result<bool, Error> {
        let c = &self.0.channel.context;
        let (mut cq, mut context) = (null_mut(), null_mut());
        let channel = self.0.channel.raw.as_ptr();
        // SAFETY: a living channel whose descriptor does not wait, and room for the answers.
        if unsafe { (c.lib.ibv_get_cq_event)(channel, &mut cq, &mut context) } != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(false),
                e => Err(error(e)),
            };
        }
        // SAFETY: one notification of this queue, the only one of the channel, was taken.
        unsafe { (c.lib.ibv_ack_cq_events)(self.0.raw.as_ptr(), 1) };
        Ok(true)
    }

    fn fd(&self) -> Option<RawFd> {
        // SAFETY: a living channel; the field never changes.
        Some(unsafe { (*self.0.channel.raw.as_ptr()).fd })
    }
}
