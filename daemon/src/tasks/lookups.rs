//! What the daemon looks up for its core, in `/proc` and in the kernel's tables. That takes time and may hang, so
//! a helper thread makes each look, and the core gets the result.

use crate::clients::adopt;
use crate::core::register::Registration;
use crate::core::Shared;
use crate::dataplane::thread::DataPlane;
use crate::lanes::holders;
use crate::lanes::inherited;
use crate::lanes::inherited::Inherited;
use crate::lanes::unseen;
use crate::os::pool;
use crate::os::process::ProcId;
use crate::os::translated;
use crate::os::wire::{HandedOver, Lost};
use crate::pairing::socket;
use crate::pairing::unprovable;
use crate::tasks::readings;
use crate::tasks::share::{self, Share};
use lane::proto::reason::Reason;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;
use underpass_admin::proc;
use underpass_ibv::Ibv;
use underpass_rdma::devices::{Tree, Watch};
use underpass_rdma::verbs::DeviceId;

/// How long the look at one process may take, and after how many that hang the scan is given up.
const LOOK_MAX: Duration = Duration::from_secs(2);
const HANGING_MAX: u32 = 16;

/// Devices are looked at this often.
const DEVICES_LOOK: Duration = Duration::from_secs(1);

/// Looks at the RDMA devices, for ever, and whenever one is named in `stale`. Reading a device's
/// addresses takes a thousand files: not on the thread that serves everybody.
pub(crate) async fn watch_devices(shared: Shared, mut stale: UnboundedReceiver<DeviceId>) {
    let mut watch = Some(Watch::new(Tree::system()));
    loop {
        let Some(mut w) = watch.take() else { return };
        while let Ok(id) = stale.try_recv() {
            w.stale(&id);
        }
        let looked = tokio::task::spawn_blocking(move || {
            let changes = w.look();
            (w, changes)
        });
        let Ok((w, changes)) = looked.await else {
            watch = Some(Watch::new(Tree::system())); // it begins anew
            tokio::time::sleep(DEVICES_LOOK).await;
            continue;
        };
        watch = Some(w);
        shared.borrow_mut().rails(|r| match changes.is_empty() {
            true => r.watch_devices(),
            false => r.devices_changed(&changes),
        });
        tokio::select! {
            () = tokio::time::sleep(DEVICES_LOOK) => {}
            id = stale.recv() => {
                if let (Some(w), Some(id)) = (&mut watch, id) {
                    w.stale(&id);
                }
            }
        }
    }
}

/// Carries out the effects of the data plane's steps, for ever.
pub(crate) async fn take_in(shared: Shared, plane: Arc<DataPlane<Ibv>>) {
    loop {
        plane.news.notified().await;
        shared.borrow_mut().effects();
    }
}

/// Looks once at every process that may be looked at: see [`mod@adopt`].
pub(crate) async fn adopt(shared: Shared) {
    let homes: Arc<[lane::family::Home]> = shared.borrow().homes.clone().into();
    if !homes.is_empty() {
        let pids = tokio::task::spawn_blocking(adopt::pids)
            .await
            .unwrap_or_default();
        let mut hanging = 0;
        for pid in pids {
            let homes = homes.clone();
            let look = tokio::task::spawn_blocking(move || adopt::look_into(pid, &homes));
            match tokio::time::timeout(LOOK_MAX, look).await {
                Ok(Ok(Some(mut f))) => {
                    let begun = readings::begin(&shared, (f.ident, f.table), f.id).await;
                    let Some((table, found)) = begun else {
                        continue;
                    };
                    f.table = table;
                    shared.borrow_mut().adopt(f, found);
                }
                Ok(_) => {}
                Err(_) => {
                    tracing::warn!("process {pid} cannot be looked at: it hangs");
                    hanging += 1;
                    if hanging == HANGING_MAX {
                        break;
                    }
                }
            }
        }
    }
    let mut core = shared.borrow_mut();
    core.scanned = true;
    core.scan_done.notify_waiters();
}

/// Drops recovered processes that have ended.
pub(crate) async fn prune_recovered(shared: &Shared) {
    let ids: Vec<ProcId> = shared.borrow().recovered.iter().map(|r| r.id).collect();
    if ids.is_empty() {
        return;
    }
    let look = move || {
        let dead = |i: &ProcId| proc::start_time(i.pid) != Some(i.start);
        ids.into_iter().filter(dead).collect::<Vec<_>>()
    };
    let dead = tokio::task::spawn_blocking(look).await.unwrap_or_default();
    shared
        .borrow_mut()
        .forget_recovered(|r| dead.contains(&r.id));
}

/// One look at all unprovable ends: see [`mod@unprovable`].
pub(crate) async fn look_at_unprovable(shared: &Shared) {
    let unprovable = shared.borrow().unprovable();
    if unprovable.is_empty() {
        return;
    }
    let look = move || {
        let seen = unprovable::look(&unprovable);
        unprovable
            .iter()
            .map(|d| d.who)
            .zip(seen)
            .collect::<Vec<_>>()
    };
    let seen = tokio::task::spawn_blocking(look).await.unwrap_or_default();
    let mut core = shared.borrow_mut();
    for (who, s) in seen {
        core.looked_for(who, s);
    }
}

/// Looks this often for ends of which it is to be looked up how this node translates their addresses.
const TRANSLATED_LOOK: Duration = Duration::from_millis(500);
/// And rests this many times as long as it took.
const TRANSLATED_REST: u32 = 20;

/// Looks the real addresses of ends up that wait for one of another node, for ever.
pub(crate) async fn look_for_translated(core: Shared) {
    let mut rest = TRANSLATED_LOOK;
    loop {
        tokio::time::sleep(rest).await;
        rest = TRANSLATED_LOOK;
        let due = core.borrow_mut().untranslated();
        if due.is_empty() {
            continue;
        }
        let begin = Instant::now();
        let look = move || {
            let (ends, leaving): (Vec<_>, Vec<_>) = due.into_iter().unzip();
            ends.into_iter().zip(translated::look(&leaving)).collect()
        };
        let found = tokio::task::spawn_blocking(look).await;
        core.borrow_mut().translated(found.unwrap_or_default());
        rest = rest.max(begin.elapsed() * TRANSLATED_REST);
    }
}

/// Rest between two looks: at least this, and this many times as long as a look takes.
const INHERITED_LOOK: Duration = Duration::from_secs(1);
const INHERITED_REST: u32 = 50;
/// But no longer than this: the other end is told only when two looks have found nobody.
const INHERITED_REST_MAX: Duration = Duration::from_secs(5);

/// Looks at inherited ends as long as there are any.
pub(crate) async fn look_at_inherited(core: Shared) {
    let news = core.borrow().inherited.news.clone();
    loop {
        let all: Vec<Inherited> = core
            .borrow()
            .inherited
            .all
            .iter()
            .map(Inherited::copy)
            .collect();
        if all.is_empty() {
            news.notified().await;
            continue;
        }
        let begin = Instant::now();
        let looked = tokio::task::spawn_blocking(move || inherited::look(&all)).await;
        if let Ok(holders) = looked {
            core.borrow_mut().inherited_looked_at(&holders);
        }
        tokio::time::sleep(
            (begin.elapsed() * INHERITED_REST).clamp(INHERITED_LOOK, INHERITED_REST_MAX),
        )
        .await;
    }
}

/// Looks for holders whenever an end asks, for ever.
pub(crate) async fn look_for_holders(core: Shared) {
    let news = core.borrow().holders.news.clone();
    let mut share = Share::new(Instant::now());
    loop {
        let (asked, others) = {
            let h = &mut core.borrow_mut().holders;
            let asked = std::mem::take(&mut h.asked).into_values();
            (asked.collect::<Vec<_>>(), h.others.clone())
        };
        if asked.is_empty() {
            news.notified().await;
            continue;
        }
        let look = move || {
            let begin = share::thread_time();
            let verdicts = holders::look(asked, &others);
            (verdicts, share::thread_time().saturating_sub(begin))
        };
        let (verdicts, took) = tokio::task::spawn_blocking(look).await.unwrap_or_default();
        for (asked, verdict) in verdicts {
            core.borrow_mut().looked_at_holders(asked, verdict);
        }
        tokio::time::sleep(share.rest(Instant::now(), took)).await;
    }
}

/// Wait before each look, and rest after it: this many times as long as it took.
const UNSEEN_LOOK: Duration = Duration::from_secs(1);
const UNSEEN_REST: u32 = 50;

/// Looks for closes that no hook sees, as long as there are lanes to other nodes.
pub(crate) async fn look_for_unseen_closes(core: Shared) {
    let news = core.borrow().held.clone();
    loop {
        if core
            .borrow()
            .rails
            .as_ref()
            .is_none_or(|r| !r.lock().has_held())
        {
            news.notified().await;
        }
        tokio::time::sleep(UNSEEN_LOOK).await;
        let all = core.borrow_mut().idle_ends();
        if all.is_empty() {
            continue;
        }
        let begin = Instant::now();
        let looked = tokio::task::spawn_blocking(move || unseen::closed(all)).await;
        for idle in looked.unwrap_or_default() {
            core.borrow_mut().rails(|r| r.not_held(&idle));
        }
        tokio::time::sleep(begin.elapsed() * UNSEEN_REST).await;
    }
}

/// Wait before the first search: two ends that are expedited usually find each other without one.
const SEARCH_FIRST: Duration = Duration::from_millis(50);
/// Longest rest between two searches.
const SEARCH_REST_MAX: Duration = Duration::from_secs(5);

/// Searches whenever there is something to search for, for ever.
pub(crate) async fn search(shared: Shared) {
    let wake = shared.borrow().lookup.wake.clone();
    loop {
        wake.notified().await;
        let mut rest = SEARCH_FIRST;
        loop {
            tokio::time::sleep(rest).await;
            let Some(task) = shared.borrow_mut().next_search() else {
                break;
            };
            let began = Instant::now();
            let done = tokio::task::spawn_blocking(move || task.run()).await;
            rest = (began.elapsed() * 10).clamp(SEARCH_FIRST, SEARCH_REST_MAX);
            if let Ok(found) = done {
                shared.borrow_mut().searched(found);
            }
        }
    }
}

/// Reads a registered socket, and closes our copy, by a helper in its tenant's share.
pub(crate) async fn read_registration(shared: Shared, r: Registration) {
    let Registration {
        who,
        tcp_pos,
        flags,
        fd,
        proof,
        ..
    } = r;
    let payer = fd.payer().cloned();
    let read = pool::READS.run(payer, move || {
        let taken = match HandedOver::take(fd) {
            Ok(taken) => taken?,
            Err(Lost) => return Some(Err(Reason::Limit)),
        };
        let read = socket::read(taken.as_fd(), tcp_pos, flags, &*proof);
        taken.close();
        Some(read)
    });
    if let Some(read) = read.await {
        shared
            .borrow_mut()
            .registration_read(who, read, r.came, flags);
    }
    drop(r.job);
    shared.borrow_mut().credit(who.client, r.control);
}
