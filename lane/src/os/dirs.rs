//! Runtime directories: where a daemon has its sockets, and where shim and tool look for it.

/// The system daemon's.
pub const SYSTEM_DIR: &str = "/run/underpass";
/// Environment variable that names the runtime directory, for shim and tool: then no other is considered.
pub const DIR_ENV: &str = "UNDERPASS_DIR";
/// Environment variable of the user's directory (XDG Base Directory Specification).
pub const XDG_ENV: &str = "XDG_RUNTIME_DIR";

/// The directory of the daemon of user `uid`, in two parts, the second after the first: the shim has no allocator.
/// `xdg`: the value of [`XDG_ENV`]; it counts if it is absolute and a directory. `digits`: room for the number.
pub fn user_dir<'a>(
    xdg: Option<&'a [u8]>,
    is_dir: impl FnOnce(&'a [u8]) -> bool,
    uid: u32,
    digits: &'a mut [u8; 10],
) -> [&'a [u8]; 2] {
    match xdg {
        Some(d) if d.starts_with(b"/") && is_dir(d) => [d, b"/underpass"],
        _ => [b"/tmp/underpass-", decimal(uid, digits)],
    }
}

fn decimal(mut n: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_or_one_below_tmp() {
        let of = |xdg: Option<&'static [u8]>, there, uid| {
            let mut digits = [0; 10];
            user_dir(xdg, |_| there, uid, &mut digits).concat()
        };
        assert_eq!(of(Some(b"/run/user/7"), true, 7), b"/run/user/7/underpass");
        assert_eq!(of(Some(b"/run/user/7"), false, 7), b"/tmp/underpass-7");
        assert_eq!(of(Some(b"relative"), true, 7), b"/tmp/underpass-7");
        assert_eq!(of(None, true, 0), b"/tmp/underpass-0");
        assert_eq!(of(None, true, u32::MAX), b"/tmp/underpass-4294967295");
    }
}
