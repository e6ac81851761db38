//! Descriptors that the shim gives up: what happens to them cannot be seen, or no lane can serve it.

use crate::promotion::{self, family};
use crate::readiness::epoll;
use crate::state::fdtab::{self, Fd};
use crate::state::table;
use crate::sys::{self, env, thread};
use crate::{daemon, sets, tcp};
use core::sync::atomic::Ordering::*;
use lane::proto::reason::Reason;

/// The descriptor now belongs to code that the hooks do not see (stdio): TCP for good. It is forgotten, because
/// its number may get another meaning unnoticed.
pub fn disown(fd: i32) {
    let _inside = thread::enter();
    if let Some(i) = tcp::proven(fd) {
        crate::preserving_errno(|| {
            promotion::leave(i, fd, Reason::Bypassed);
            fdtab::set(fd, Fd::Other);
            let l = table::local(i);
            if table::let_go(l) {
                let inherited = family::closing(l);
                // As in `end`; we shall not notice its close.
                daemon::take_back(i, table::conn(i).gen.load(Relaxed));
                sets::disowned(i);
                promotion::end_lane(i, false);
                table::release(i);
                family::closed(inherited);
            }
        });
    }
}

/// A descriptor is used in a way that no lane can serve: the connection goes back to TCP for good.
pub fn force_tcp(fd: i32, why: Reason) {
    if fdtab::conn(fd).is_none() {
        return;
    }
    let _inside = thread::enter();
    if let Some(i) = crate::preserving_errno(|| tcp::proven(fd)) {
        crate::preserving_errno(|| promotion::leave(i, fd, why));
    }
}

/// The same for all descriptors of a call, and the reason for each: their connections leave together, and have one deadline.
/// So do those that are in an epoll set among them. `each` names all of them whenever it is called.
pub fn force_all(each: impl Fn(&mut dyn FnMut(i32, Reason))) {
    let _inside = thread::enter();
    crate::preserving_errno(|| {
        let (mut conns, mut sets) = (false, false);
        each(&mut |fd, why| match fdtab::get(fd) {
            Fd::Conn(_) => {
                if let Some(i) = tcp::proven(fd) {
                    promotion::set_off(i, fd, why);
                    conns = true;
                }
            }
            Fd::Set(_) => sets = true,
            _ => {}
        });
        if sets {
            epoll::nest_all(|f| {
                each(&mut |fd, _| {
                    if let Fd::Set(s) = fdtab::get(fd) {
                        f(s);
                    }
                });
            });
        }
        if conns {
            promotion::await_all(|f| {
                each(&mut |fd, _| {
                    if let Some(i) = fdtab::conn(fd) {
                        f(i);
                    }
                });
            });
        }
    });
}

/// Called before a thread gets a descriptor table of its own: a number may then mean one thing to it and another
/// to the other threads, so no connection can be carried any more.
pub fn before_split() {
    // (A single thread splits from nobody; a vfork child has its own descriptors already.)
    if !table::is_vfork_child() && !sys::is_single_threaded() {
        step_out(Reason::Shared);
    }
}

/// All connections leave their lanes for good, together, and from now on the shim ignores all descriptors of this process.
pub fn step_out(why: Reason) {
    if env::off() || table::is_vfork_child() {
        return;
    }
    crate::preserving_errno(|| {
        let all = || promotion::leave_all(|f| table::each_fd(|fd, i, _| f(i, fd)), why);
        all();
        env::switch_off();
        all(); // once more, for what another thread has made meanwhile
        fdtab::forget_all();
    });
}
