//! Makes certificates: of a private CA, and of nodes. Keys are ECDSA on P-256. What certificates say is read by
//! `underpass_admin::certificate`.

#![warn(missing_docs, unreachable_pub)]
// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};
use underpass_admin::certificate::{facts_of_pem, Facts, EARLIER_S};

/// Certificates become valid a little before they are made, because clocks differ.
pub const EARLIER: Duration = Duration::seconds(EARLIER_S);

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Making one has failed.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The CA's key cannot be read.
    #[error("no usable key: {0}")]
    Key(rcgen::Error),
    /// The CA's certificate cannot be read.
    #[error("no certificate")]
    NoCertificate,
    /// It may not sign others.
    #[error("not the certificate of a CA")]
    NotCa,
    /// The key is not that of the certificate.
    #[error("not the certificate of this key")]
    OtherKey,
    /// The CA's certificate has ended.
    #[error("this CA has expired; make a new one")]
    Expired,
    /// A request that cannot be read, or is not signed by its own key.
    #[error("no usable request: {0}")]
    Request(rcgen::Error),
}

/// A certificate and its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// The secret.
    pub key: String,
}

fn params(
    names: Vec<String>,
    common: &str,
    life: Duration,
    now: OffsetDateTime,
) -> Result<CertificateParams, Error> {
    let mut p = CertificateParams::new(names)?;
    p.distinguished_name = DistinguishedName::new();
    p.distinguished_name.push(DnType::CommonName, common);
    p.not_before = now - EARLIER;
    p.not_after = now + life;
    Ok(p)
}

/// Makes a CA of this name, valid from now on for so long.
pub fn ca(name: &str, life: Duration, now: OffsetDateTime) -> Result<Pair, Error> {
    let key = KeyPair::generate()?;
    let mut p = params(Vec::new(), name, life, now)?;
    p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let cert = p.self_signed(&key)?.pem();
    let key = key.serialize_pem();
    Ok(Pair { cert, key })
}

/// A CA that signs.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// What its certificate says.
    pub facts: Facts,
}

impl Authority {
    /// Reads it.
    pub fn load(cert: &str, key: &str) -> Result<Authority, Error> {
        let key = KeyPair::from_pem(key).map_err(Error::Key)?;
        let facts = facts_of_pem(cert).ok_or(Error::NoCertificate)?;
        if !facts.ca {
            return Err(Error::NotCa);
        }
        if facts.public_key != key.public_key_raw() {
            return Err(Error::OtherKey);
        }
        let issuer = Issuer::from_ca_cert_pem(cert, key)?;
        Ok(Authority { issuer, facts })
    }

    /// When a certificate ends that is to last for so long: with its CA at the latest.
    fn node_params(
        &self,
        names: Vec<String>,
        common: &str,
        life: Duration,
        now: OffsetDateTime,
    ) -> Result<CertificateParams, Error> {
        let mut p = params(names, common, life, now)?;
        let end = OffsetDateTime::from_unix_timestamp(self.facts.not_after).unwrap_or(p.not_after);
        if end <= now {
            return Err(Error::Expired);
        }
        p.not_after = p.not_after.min(end);
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Each node is a server to some peers and a client to others.
        p.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        p.use_authority_key_identifier_extension = true;
        Ok(p)
    }

    /// Makes a node's certificate and key. It lasts for so long, but not longer than its CA.
    pub fn node(
        &self,
        names: Vec<String>,
        common: &str,
        life: Duration,
        now: OffsetDateTime,
    ) -> Result<Pair, Error> {
        let key = KeyPair::generate()?;
        let cert = self.node_params(names, common, life, now)?;
        let cert = cert.signed_by(&key, &self.issuer)?.pem();
        let key = key.serialize_pem();
        Ok(Pair { cert, key })
    }

    /// Makes the certificate of a node for whoever has the key of a request. Of the request only the key counts.
    pub fn sign(
        &self,
        request: Request,
        node: &str,
        life: Duration,
        now: OffsetDateTime,
    ) -> Result<String, Error> {
        let mut r = request.0;
        r.params = self.node_params(vec![node.into()], node, life, now)?;
        Ok(r.signed_by(&self.issuer)?.pem())
    }
}

/// A request for a certificate (PKCS #10), signed by its key.
#[derive(Debug)]
pub struct Request(CertificateSigningRequestParams);

impl Request {
    /// Reads one from PEM, and checks its signature.
    pub fn read(pem: &str) -> Result<Request, Error> {
        let r = CertificateSigningRequestParams::from_pem(pem).map_err(Error::Request)?;
        Ok(Request(r))
    }

    /// The DNS name that it asks for, if that is all that it asks for.
    pub fn name(&self) -> Option<&str> {
        match &*self.0.params.subject_alt_names {
            [SanType::DnsName(n)] => Some(n.as_str()),
            _ => None,
        }
    }

    /// Makes a key, and a request for a node's certificate: PEM of both, the request first.
    pub fn make(node: &str) -> Result<(String, String), Error> {
        let key = KeyPair::generate()?;
        let mut p = CertificateParams::new(vec![node.into()])?;
        p.distinguished_name = DistinguishedName::new();
        p.distinguished_name.push(DnType::CommonName, node);
        Ok((p.serialize_request(&key)?.pem()?, key.serialize_pem()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_signed_for_its_node() {
        let now = OffsetDateTime::now_utc();
        let made = ca("test", Duration::days(1), now).unwrap();
        let authority = Authority::load(&made.cert, &made.key).unwrap();
        let (csr, key) = Request::make("a").unwrap();
        let request = Request::read(&csr).unwrap();
        assert_eq!(request.name(), Some("a"));
        let cert = authority
            .sign(request, "a", Duration::days(7), now)
            .unwrap();
        let facts = facts_of_pem(&cert).unwrap();
        assert_eq!(facts.names, ["a"]);
        assert!(!facts.ca && facts.issuer == authority.facts.subject);
        // Not longer than its CA.
        assert_eq!(facts.not_after, authority.facts.not_after);
        let key = KeyPair::from_pem(&key).unwrap();
        assert_eq!(facts.public_key, key.public_key_raw());
        let later = now + Duration::days(2);
        let end = authority.node(vec!["a".into()], "a", Duration::days(1), later);
        assert!(matches!(end, Err(Error::Expired)));
    }

    #[test]
    fn what_is_no_ca_does_not_sign() {
        let now = OffsetDateTime::now_utc();
        let one = ca("one", Duration::days(1), now).unwrap();
        let two = ca("two", Duration::days(1), now).unwrap();
        let e = Authority::load(&one.cert, &two.key).unwrap_err();
        assert!(matches!(e, Error::OtherKey));
        let authority = Authority::load(&one.cert, &one.key).unwrap();
        let node = authority
            .node(vec!["a".into()], "a", Duration::hours(1), now)
            .unwrap();
        assert!(matches!(
            Authority::load(&node.cert, &node.key),
            Err(Error::NotCa)
        ));
        assert!(matches!(
            Authority::load("", &one.key),
            Err(Error::NoCertificate)
        ));
    }

    #[test]
    fn a_request_that_is_not_its_keys_is_refused() {
        let (csr, _) = Request::make("a").unwrap();
        // One bit of the signature, at the end of the text.
        let at = csr.find("\n-----END").unwrap() - 6;
        let mut other = csr.clone().into_bytes();
        other[at] = if other[at] == b'A' { b'B' } else { b'A' };
        assert!(Request::read(std::str::from_utf8(&other).unwrap()).is_err());
        assert!(Request::read("").is_err());
        let key = KeyPair::generate().unwrap();
        let two = CertificateParams::new(vec!["a".into(), "b".into()]).unwrap();
        let two = two.serialize_request(&key).unwrap().pem().unwrap();
        assert_eq!(Request::read(&two).unwrap().name(), None);
    }
}
