//! How a daemon shows that it knows both initial sequence numbers of a connection, without telling
//! them.
//!
//! An end behind address translation is looked for at every node. Anyone who knows a connection's sequence numbers
//! can inject data from anywhere, and could pose as its other end. So what is sent is a digest of them, under a
//! key that only the two ends of one TLS channel have (its exporter). It tells nothing to a node that does not
//! hold the other end, and cannot be passed on to a third node. It includes the seeker's name, so that it cannot
//! be sent back as the answer.

use super::msg::Digest;
use lane::num;
use ring::hmac;

/// Label of the exporter (RFC 8446, 7.5).
pub const LABEL: &[u8] = b"EXPORTER-underpass-connection-proof";

/// Key of one channel.
#[derive(Clone)]
pub struct Key(hmac::Key);

impl Key {
    pub fn new(exported: &[u8; 32]) -> Key {
        Key(hmac::Key::new(hmac::HMAC_SHA256, exported))
    }

    /// The digest that node `sender` sends about an end with these numbers.
    pub fn digest(&self, sender: &str, snd: u32, rcv: u32) -> Digest {
        let mut c = hmac::Context::with_key(&self.0);
        c.update(&num::small(sender.len()).to_be_bytes());
        c.update(sender.as_bytes());
        c.update(&snd.to_be_bytes());
        c.update(&rcv.to_be_bytes());
        let mut out = Digest::default();
        out.copy_from_slice(c.sign().as_ref());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_matters() {
        let k = Key::new(&[1; 32]);
        let d = k.digest("a", 5, 9);
        assert_eq!(d, Key::new(&[1; 32]).digest("a", 5, 9));
        for other in [
            k.digest("b", 5, 9),
            k.digest("a", 9, 5),
            k.digest("a", 5, 8),
            Key::new(&[2; 32]).digest("a", 5, 9),
        ] {
            assert_ne!(d, other);
        }
    }
}
