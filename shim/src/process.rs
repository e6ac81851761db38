//! What happens to descriptors and to the process: close, dup, shutdown, fork, exec, spawn, and what comes from other
//! processes.
//!
//! Here connections enter the tables and leave them, so this room is above all others but the hooks. It never waits for
//! the daemon, and for a peer only as long as that gets to take its bytes back.

pub mod arrivals;
mod close;
mod disown;
mod exec;
mod exit;
mod fork;
mod linger;
mod made;
mod remote;
mod shutdown;
mod unseen;

pub use close::{before_close, closed, finish_close};
pub use disown::{before_split, disown, force_all, force_tcp, step_out};
pub use exec::{all_left, before_exec, exec_failed, lend, spawned, spawned_ended, spawning};
pub use exit::exits;
pub use fork::{after_fork_child, after_fork_parent, before_fork};
pub use made::{
    connected, copied_for_another, disconnects, duplicated, is_tcp, listening, socket_made, taken,
};
pub use shutdown::{after_shutdown, before_shutdown, Left};
pub use unseen::{not_ours, replaced, vanished};
