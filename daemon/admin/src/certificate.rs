//! What the certificate of a node says, and the names that one can carry.

use std::net::IpAddr;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Certificates become valid so many seconds before they are made, because clocks differ.
pub const EARLIER_S: i64 = 3600;

/// What a certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Distinguished name of whom it is about (RFC 5280, section 4.1.2.6).
    pub subject: String,
    /// Distinguished name of who signed it.
    pub issuer: String,
    /// May it sign others?
    pub ca: bool,
    /// The key alone, as the certificate has it.
    pub public_key: Vec<u8>,
    /// DNS names.
    pub names: Vec<String>,
    /// Seconds since 1970.
    pub not_before: i64,
    /// Seconds since 1970, the last at which it holds.
    pub not_after: i64,
}

/// Was a certificate made before its node, which came into being at that second (0: not known)? A node that was removed and
/// made again has to have another one. (Clocks differ by a minute at most, where nodes come from a cluster.)
pub fn is_older(f: &Facts, since: i64) -> bool {
    since != 0 && f.not_before + EARLIER_S + 60 < since
}

impl Facts {
    /// For how many seconds it is valid from the beginning: some last for years, some for a day.
    pub fn life_s(&self) -> i64 {
        self.not_after - self.not_before
    }
}

/// Reads names and times; `None` if this is no certificate. Says nothing about who signed it.
pub fn facts(der: &[u8]) -> Option<Facts> {
    let (_, cert) = X509Certificate::from_der(der).ok()?;
    let mut names = Vec::new();
    if let Ok(Some(san)) = cert.subject_alternative_name() {
        for n in &san.value.general_names {
            if let GeneralName::DNSName(n) = n {
                names.push((*n).to_owned());
            }
        }
    }
    let v = cert.validity();
    Some(Facts {
        subject: cert.subject().to_string(),
        issuer: cert.issuer().to_string(),
        ca: cert.is_ca(),
        public_key: cert.public_key().subject_public_key.data.to_vec(),
        names,
        not_before: v.not_before.timestamp(),
        not_after: v.not_after.timestamp(),
    })
}

/// The same of all certificates in a text (PEM) that can be read.
pub fn facts_of_all(text: &str) -> Vec<Facts> {
    let blocks = Pem::iter_from_buffer(text.as_bytes()).flatten();
    let certificates = blocks.filter(|b| b.label == "CERTIFICATE");
    certificates.filter_map(|b| facts(&b.contents)).collect()
}

/// The same of the first certificate in a text.
pub fn facts_of_pem(text: &str) -> Option<Facts> {
    facts_of_all(text).into_iter().next()
}

/// Is this a name that certificates can carry, in the one form that is compared?
pub fn valid_name(s: &str) -> bool {
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    // A name that reads as an address would be checked as one.
    s.len() <= 253 && s.split('.').all(label) && s.parse::<IpAddr>().is_err()
}
