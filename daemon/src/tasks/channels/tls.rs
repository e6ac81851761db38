//! Who a peer daemon is: certificates of a private CA, TLS 1.3 with both sides authenticated.
//!
//! The files are read again when they change, so that certificates rotate without a restart; a change that cannot
//! be used (a file half written, say) leaves the old ones in place. Sessions are never resumed: every channel
//! proves both identities with certificates that are valid now, and every channel has key material of its own (see
//! `digest`).

use crate::config::TlsConfig;
use crate::nodes::peers::now;
use rustls::client::Resumption;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use underpass_admin::certificate::{facts, Facts};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    Pem(PathBuf, pem::Error),
    #[error("{0} has no certificate in it")]
    Empty(PathBuf),
    #[error("{0}: no certificate that can be read")]
    Parse(PathBuf),
    #[error("{0}: no usable CA certificate: {1}")]
    Ca(PathBuf, String),
    #[error("{0} and {1}: {2}")]
    Pair(PathBuf, PathBuf, rustls::Error),
    #[error("{path} names [{names}], not this node, `{own}`")]
    Name {
        path: PathBuf,
        names: String,
        own: String,
    },
}

/// How long until `not_after`.
pub fn left(not_after: i64) -> Duration {
    Duration::from_secs(u64::try_from(not_after - now()).unwrap_or(0))
}

/// Everything that a handshake needs.
#[derive(Clone)]
pub struct Identity {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    pub own: Facts,
}

fn certs(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let fail = |e| Error::Pem(path.into(), e);
    let all: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(fail)?.collect();
    let all = all.map_err(fail)?;
    if all.is_empty() {
        return Err(Error::Empty(path.into()));
    }
    Ok(all)
}

/// Reads the files.
pub fn load(files: &TlsConfig, own: &str) -> Result<Identity, Error> {
    let mut roots = RootCertStore::empty();
    for c in certs(&files.ca)? {
        roots
            .add(c)
            .map_err(|e| Error::Ca(files.ca.clone(), e.to_string()))?;
    }
    let roots = Arc::new(roots);
    let chain = certs(&files.cert)?;
    let key =
        PrivateKeyDer::from_pem_file(&files.key).map_err(|e| Error::Pem(files.key.clone(), e))?;
    let facts = facts(&chain[0]).ok_or_else(|| Error::Parse(files.cert.clone()))?;
    if !facts.names.iter().any(|n| n == own) {
        return Err(Error::Name {
            path: files.cert.clone(),
            names: facts.names.join(", "),
            own: own.into(),
        });
    }
    let pair = |e| Error::Pair(files.cert.clone(), files.key.clone(), e);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = &[&rustls::version::TLS13];
    let mut client = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .map_err(pair)?
        .with_root_certificates(roots.clone())
        .with_client_auth_cert(chain.clone(), key.clone_key())
        .map_err(pair)?;
    client.resumption = Resumption::disabled();
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|e| Error::Ca(files.ca.clone(), e.to_string()))?;
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(pair)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(pair)?;
    server.send_tls13_tickets = 0;
    Ok(Identity {
        client: Arc::new(client),
        server: Arc::new(server),
        own: facts,
    })
}

/// May anyone but its owner access the key file?
pub fn exposed(files: &TlsConfig) -> bool {
    std::fs::metadata(&files.key).is_ok_and(|m| m.mode() & 0o077 != 0)
}

/// Device, inode, modification time and size: what differs between two states of a file.
type Stamp = Option<(u64, u64, i64, i64, u64)>;

/// The state of the files, compared to notice a change. Renames, rewrites and replaced symbolic links (as in mounted
/// Kubernetes secrets) are all noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamps([Stamp; 3]);

pub fn stamps(files: &TlsConfig) -> Stamps {
    let of = |p: &Path| {
        let m = std::fs::metadata(p).ok()?;
        Some((m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.size()))
    };
    Stamps([of(&files.ca), of(&files.cert), of(&files.key)])
}

/// An error of a handshake, or of the reading after it, in words that say whose fault it is. In
/// TLS 1.3 a server's refusal of our certificate arrives as an alert after our own handshake.
pub fn explain(e: &std::io::Error) -> String {
    use rustls::AlertDescription as A;
    use rustls::CertificateError as C;
    use rustls::Error as E;
    let inner = e.get_ref().and_then(|i| i.downcast_ref::<E>());
    let text = match inner {
        Some(E::AlertReceived(a)) => {
            let why = match a {
                A::UnknownCA => "signed by a CA that it does not know",
                A::CertificateExpired => "expired, by its clock",
                A::BadCertificate | A::CertificateUnknown | A::UnsupportedCertificate => {
                    "not valid for this"
                }
                A::CertificateRequired => "missing",
                A::AccessDenied => "not allowed",
                A::DecryptError => "signed by a CA that only has the name of the one it knows",
                other => return format!("the peer refused the handshake: {other:?}"),
            };
            return format!("the peer refused our certificate: {why}");
        }
        Some(E::InvalidCertificate(c)) => match c {
            C::UnknownIssuer => "signed by a CA that we do not know".into(),
            C::BadSignature => "not signed by our CA, although it says so".into(),
            C::Expired | C::ExpiredContext { .. } => "expired".into(),
            C::NotValidYet | C::NotValidYetContext { .. } => "not valid yet".into(),
            C::NotValidForName | C::NotValidForNameContext { .. } => "of another node".into(),
            C::InvalidPurpose | C::InvalidPurposeContext { .. } => "not meant for this".into(),
            other => format!("not valid: {other}"),
        },
        Some(E::NoCertificatesPresented) => return "the peer showed no certificate".into(),
        Some(other) => return format!("TLS: {other}"),
        None => return e.to_string(),
    };
    format!("the peer's certificate is {text}")
}
