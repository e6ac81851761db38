//! Tenants: for whom limits are counted. A pod, a login, a service; by the cgroup of a process, which the process cannot
//! choose, cut where it could go on by making more cgroups.

use crate::os::sockopt;
use std::os::fd::BorrowedFd;
use underpass_admin::proc;

/// Whose a process of this user is. `cgroups`: all that `/proc/PID/cgroup` says of it.
pub(crate) fn of(cgroups: &str, uid: u32) -> String {
    let key = proc::cgroup_key(cgroups);
    // In these are all users: on a machine without cgroups, or without a memory controller for logins.
    match key.as_str() {
        "/" | "/user.slice" => format!("{key} uid {uid}"),
        _ => key,
    }
}

/// Who asks, among those who share a tenant: users of a service have each their own turns.
pub(crate) fn user_of(cgroups: &str, uid: u32) -> String {
    format!("{uid} {}", of(cgroups, uid))
}

/// Whose what a process has left is that has ended: its cgroup is not known any more.
pub(crate) fn ended(uid: u32) -> String {
    format!("ended, uid {uid}")
}

/// Whose the other end of a control connection is.
pub(crate) fn of_peer(sock: BorrowedFd<'_>) -> String {
    let Ok(cred) = sockopt::peer_cred(sock) else {
        return String::new(); // (a Unix socket tells)
    };
    let cgroups = u32::try_from(cred.pid).ok().and_then(proc::cgroups);
    cgroups.map_or_else(|| ended(cred.uid), |c| of(&c, cred.uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_shares_with_whom() {
        assert_ne!(of("0::/\n", 1), of("0::/\n", 2));
        assert_ne!(
            of("4:memory:/user.slice\n", 1),
            of("4:memory:/user.slice\n", 2)
        );
        // In a container everybody may become anybody.
        let service = "0::/system.slice/a.service/b\n";
        assert_eq!(of(service, 1), of(service, 2));
        assert_eq!(of(service, 1), "/system.slice/a.service");
        assert_ne!(ended(1), of("0::/\n", 1));
        assert_ne!(user_of(service, 1), user_of(service, 2));
        assert_eq!(
            user_of(service, 1),
            user_of("0::/system.slice/a.service\n", 1)
        );
    }
}
