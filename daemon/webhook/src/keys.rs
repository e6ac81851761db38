//! Key, certificate, and whom API servers trust.
//!
//! Each certificate has a CA of its own, whose key is forgotten as soon as it has signed. API servers trust that CA and the one
//! before it, so that replicas with either certificate are reached while it is renewed.

use k8s_openapi::ByteString;
use std::collections::BTreeMap;
use time::{Duration, OffsetDateTime};
use underpass_admin::certificate::{facts_of_pem, Facts};
use underpass_certificates::{self as certificates, Authority, Error};

/// How long a certificate is valid.
const LIFE: Duration = Duration::days(90);

/// Keys of the Secret's data: as of Secrets of the type `kubernetes.io/tls`.
const BUNDLE: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// Between certificates.
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";

/// What all replicas have in common. All of it is PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// CAs, the newest first.
    pub bundle: String,
    /// Signed by that one.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

/// (The key is not for logs.)
impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

impl Keys {
    /// Makes new ones for a host. `old`: those before, which are still trusted.
    pub fn make(host: &str, now: OffsetDateTime, old: Option<&Keys>) -> Result<Keys, Error> {
        // (Names of CAs differ, so that a verifier does not take one for the other.)
        let name = format!("underpass-webhook {}", now.unix_timestamp_nanos());
        let ca = certificates::ca(&name, LIFE, now)?;
        let authority = Authority::load(&ca.cert, &ca.key)?;
        let made = authority.node(vec![host.into()], host, LIFE, now)?;
        let mut bundle = ca.cert;
        if let Some(newest) = old.and_then(Keys::newest) {
            bundle.push_str(&newest);
        }
        Ok(Keys {
            bundle,
            certificate: made.cert,
            key: made.key,
        })
    }

    /// The newest CA.
    fn newest(&self) -> Option<String> {
        let (_, after) = self.bundle.split_once(BEGIN)?;
        let text = after.split(BEGIN).next()?;
        Some(format!("{BEGIN}{text}"))
    }

    /// What a Secret has; `None`: not all of it.
    pub fn from_data(data: &BTreeMap<String, ByteString>) -> Option<Keys> {
        let text = |name| String::from_utf8(data.get(name)?.0.clone()).ok();
        Some(Keys {
            bundle: text(BUNDLE)?,
            certificate: text(CERTIFICATE)?,
            key: text(KEY)?,
        })
    }

    /// The same as a Secret's data.
    pub fn to_data(&self) -> BTreeMap<String, ByteString> {
        let all = [
            (BUNDLE, &self.bundle),
            (CERTIFICATE, &self.certificate),
            (KEY, &self.key),
        ];
        all.map(|(name, text)| (name.to_owned(), ByteString(text.clone().into_bytes())))
            .into()
    }

    /// Can API servers be served with them, who call this host, at that time?
    pub fn is_usable(&self, host: &str, now: OffsetDateTime) -> bool {
        let now = now.unix_timestamp();
        let ca = self.newest().and_then(|c| facts_of_pem(&c));
        let fits = |f: &Facts| {
            let valid = f.not_before <= now && now <= f.not_after;
            valid && f.names.iter().any(|n| n == host)
        };
        match (facts_of_pem(&self.certificate), ca) {
            (Some(f), Some(ca)) => fits(&f) && f.issuer == ca.subject && now <= ca.not_after,
            _ => false,
        }
    }

    /// Is it time for new ones? After two thirds of the old ones' time.
    pub fn is_due(&self, now: OffsetDateTime) -> bool {
        let now = now.unix_timestamp();
        facts_of_pem(&self.certificate).is_none_or(|f| now - f.not_before > f.life_s() / 3 * 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::Duration;

    #[test]
    fn as_long_as_they_are_valid() {
        let now = OffsetDateTime::now_utc();
        let keys = Keys::make("a.b.svc", now, None).unwrap();
        for (days, usable, due) in [
            (-1, false, false),
            (0, true, false),
            (59, true, false),
            (61, true, true),
            (89, true, true),
            (91, false, true),
        ] {
            let then = now + Duration::days(days);
            assert_eq!(
                (keys.is_usable("a.b.svc", then), keys.is_due(then)),
                (usable, due),
                "{days}"
            );
        }
        assert!(!keys.is_usable("b.b.svc", now));
        assert!(!format!("{keys:?}").contains("PRIVATE"));
        let data = keys.to_data();
        assert_eq!(Keys::from_data(&data), Some(keys.clone()));
        for name in [BUNDLE, CERTIFICATE, KEY] {
            let mut less = data.clone();
            less.remove(name);
            assert_eq!(Keys::from_data(&less), None);
        }
        let later = now + Duration::SECOND;
        let other = Keys::make("a.b.svc", later, None).unwrap();
        let mixed = Keys {
            bundle: other.bundle,
            ..keys.clone()
        };
        assert!(!mixed.is_usable("a.b.svc", now), "signed by another");
        let broken = Keys {
            certificate: "x".into(),
            ..keys
        };
        assert!(!broken.is_usable("a.b.svc", now) && broken.is_due(now));
    }

    #[test]
    fn the_one_before_is_trusted() {
        let make = |old| Keys::make("a.b.svc", OffsetDateTime::now_utc(), old).unwrap();
        let first = make(None);
        let second = make(Some(&first));
        let third = make(Some(&second));
        let count = |k: &Keys| k.bundle.matches(BEGIN).count();
        assert_eq!([&first, &second, &third].map(count), [1, 2, 2]);
        assert!(second.bundle.ends_with(&first.bundle));
        assert!(!third.bundle.contains(&first.bundle));
        assert!(third.bundle.contains(&second.newest().unwrap()));
    }
}
