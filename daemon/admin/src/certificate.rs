//! What a certificate says, the names that one can carry, and how one is made.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use std::net::IpAddr;
use time::{Duration, OffsetDateTime};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Certificates become valid a little before they are made, because clocks differ.
const EARLIER: Duration = Duration::hours(1);

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

/// The same of the first certificate in a text.
pub fn facts_of_pem(text: &str) -> Option<Facts> {
    let mut blocks = Pem::iter_from_buffer(text.as_bytes()).flatten();
    facts(&blocks.find(|b| b.label == "CERTIFICATE")?.contents)
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

/// From `now` on, for so many days.
fn params(
    names: Vec<String>,
    common: &str,
    now: OffsetDateTime,
    days: u32,
) -> Result<CertificateParams, rcgen::Error> {
    let mut p = CertificateParams::new(names)?;
    p.distinguished_name = DistinguishedName::new();
    p.distinguished_name.push(DnType::CommonName, common);
    p.not_before = now - EARLIER;
    p.not_after = now + Duration::days(days.into());
    Ok(p)
}

/// A CA of this name, and its key, that is to sign with them from `now` on for so many days.
pub fn authority(
    name: &str,
    now: OffsetDateTime,
    days: u32,
) -> Result<(CertificateParams, KeyPair), rcgen::Error> {
    let key = KeyPair::generate()?; // ECDSA, P-256
    let mut p = params(Vec::new(), name, now, days)?;
    p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok((p, key))
}

/// What a certificate is to say that a CA signs: of somebody with these names.
pub fn holder(
    names: Vec<String>,
    common: &str,
    now: OffsetDateTime,
    days: u32,
    usages: &[ExtendedKeyUsagePurpose],
) -> Result<CertificateParams, rcgen::Error> {
    let mut p = params(names, common, now, days)?;
    p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    p.extended_key_usages = usages.to_vec();
    p.use_authority_key_identifier_extension = true;
    Ok(p)
}
