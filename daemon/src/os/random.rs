//! Random numbers that nobody can guess.

/// 64 random bits that nobody can guess.
pub(crate) fn random() -> u64 {
    let mut b = [0u8; 8];
    let mut at = 0;
    while at < b.len() {
        match rustix::rand::getrandom(&mut b[at..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => at += n,
            Err(rustix::io::Errno::INTR) => {}
            // Linux has had it since 3.17; a filter that forbids it leaves nothing to go on with.
            Err(e) => panic!("getrandom: {e}"),
        }
    }
    u64::from_ne_bytes(b)
}
