//! The CA through time: one signs, the next one is made known before it does, and what it has signed is trusted to its end.

use super::LIFE;
use std::collections::BTreeMap;
use time::{Duration, OffsetDateTime};
use underpass_admin::certificate::{facts_of_pem, Facts};
use underpass_certificates::{self as certificates, Authority, Error, Pair, EARLIER};

/// How long a CA lasts.
const CA_LIFE: Duration = Duration::days(365);
/// The next one is made when this is left of the one that signs.
const NEXT_BEFORE: Duration = Duration::days(120);
/// How long all nodes have had it before it signs.
const KNOWN: Duration = Duration::hours(1);

/// What is kept in the Secret.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kept {
    /// It signs.
    pub current: Pair,
    /// It will sign, and is trusted already.
    pub next: Option<Pair>,
    /// It has signed, and is still trusted.
    pub old: Option<String>,
}

fn facts(cert: &str) -> Result<Facts, Error> {
    facts_of_pem(cert).ok_or(Error::NoCertificate)
}

fn made(f: &Facts) -> i64 {
    f.not_before + EARLIER.whole_seconds()
}

/// A name of its own for each: whose a certificate is, is seen by it.
fn make(now: OffsetDateTime) -> Result<Pair, Error> {
    let name = format!("Underpass nodes {}", now.unix_timestamp_nanos());
    certificates::ca(&name, CA_LIFE, now)
}

impl Kept {
    pub(super) fn new(now: OffsetDateTime) -> Result<Kept, Error> {
        Ok(Kept {
            current: make(now)?,
            next: None,
            old: None,
        })
    }

    /// What there is to be from now on. `known`: what nodes are told to trust now.
    pub(super) fn step(mut self, known: &str, now: OffsetDateTime) -> Result<Kept, Error> {
        let t = now.unix_timestamp();
        let current = facts(&self.current.cert)?;
        if self.next.is_none() && current.not_after - t < NEXT_BEFORE.whole_seconds() {
            self.next = Some(make(now)?);
        }
        if let Some(next) = self.next.take() {
            let since = t - made(&facts(&next.cert)?);
            let is_known = known.contains(next.cert.trim_end());
            if (is_known && since >= KNOWN.whole_seconds()) || current.not_after <= t {
                let was = std::mem::replace(&mut self.current, next);
                self.old = Some(was.cert);
            } else {
                self.next = Some(next);
            }
        }
        // What the old one has signed ends by then.
        let signs_since = made(&facts(&self.current.cert)?) + KNOWN.whole_seconds();
        if t > signs_since + (LIFE + KNOWN).whole_seconds() {
            self.old = None;
        }
        Ok(self)
    }

    /// The certificates to trust.
    pub(super) fn trusted(&self) -> String {
        let next = self.next.as_ref().map(|p| &p.cert);
        let all = [Some(&self.current.cert), next, self.old.as_ref()];
        all.into_iter()
            .flatten()
            .map(|c| c.trim_end())
            .fold(String::new(), |text, cert| text + cert + "\n")
    }

    /// As the Secret's data.
    pub(super) fn data(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let mut put = |name: &str, text: &String| all.insert(name.into(), text.clone());
        put("tls.crt", &self.current.cert);
        put("tls.key", &self.current.key);
        if let Some(n) = &self.next {
            put("next.crt", &n.cert);
            put("next.key", &n.key);
        }
        if let Some(o) = &self.old {
            put("old.crt", o);
        }
        all
    }

    /// From the Secret's data. `Err`: what is there cannot be used.
    pub(super) fn read(data: &BTreeMap<String, String>) -> Result<Kept, Error> {
        let get = |name: &str| data.get(name).cloned().filter(|t| !t.is_empty());
        let pair = |cert: &str, key: &str| Some((get(cert)?, get(key)?));
        let read = |(cert, key): (String, String)| -> Result<Pair, Error> {
            Authority::load(&cert, &key)?;
            Ok(Pair { cert, key })
        };
        let current = pair("tls.crt", "tls.key").ok_or(Error::NoCertificate)?;
        Ok(Kept {
            current: read(current)?,
            next: pair("next.crt", "next.key").map(read).transpose()?,
            old: get("old.crt"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> usize {
        text.matches("BEGIN CERTIFICATE").count()
    }

    #[test]
    fn a_ca_is_replaced_before_it_ends() {
        let start = OffsetDateTime::now_utc();
        let mut kept = Kept::new(start).unwrap();
        let mut known: BTreeMap<String, OffsetDateTime> = BTreeMap::new();
        let mut signs = Vec::new();
        // Two years, hour by hour. A node trusts what was published an hour ago.
        for hour in 0..2 * 365 * 24 {
            let now = start + Duration::hours(hour);
            kept = kept.clone().step(&kept.trusted(), now).unwrap();
            let current = kept.current.cert.trim_end().to_owned();
            for c in kept
                .trusted()
                .split_inclusive("-----END CERTIFICATE-----\n")
            {
                known.entry(c.trim_end().into()).or_insert(now);
            }
            if signs.last() != Some(&current) {
                if !signs.is_empty() {
                    assert!(
                        now - known[&current] >= KNOWN,
                        "it was not known long enough"
                    );
                }
                signs.push(current.clone());
            }
            let left = facts(&current).unwrap().not_after - now.unix_timestamp();
            assert!(
                left > LIFE.whole_seconds(),
                "what it signs would end with it"
            );
            assert!(count(&kept.trusted()) <= 3);
        }
        assert_eq!(signs.len(), 3);
        assert_eq!(count(&kept.trusted()), 1);
    }

    #[test]
    fn what_was_signed_is_trusted_to_its_end() {
        let start = OffsetDateTime::now_utc();
        let first = Kept::new(start).unwrap();
        let at = |d: Duration| start + CA_LIFE - NEXT_BEFORE + d;
        let step = |k: Kept, d: Duration| k.clone().step(&k.trusted(), at(d)).unwrap();
        let kept = step(first.clone(), Duration::minutes(1));
        assert_eq!(kept.current, first.current);
        assert_eq!(count(&kept.trusted()), 2);
        // Not before nodes are told of it.
        let early = kept.clone().step("", at(Duration::minutes(62))).unwrap();
        assert_eq!(early.current, first.current);
        let kept = step(kept, Duration::minutes(62));
        assert_ne!(kept.current, first.current);
        assert!(kept.trusted().contains(first.current.cert.trim_end()));
        let kept = step(kept, Duration::minutes(60) + LIFE);
        assert!(kept.trusted().contains(first.current.cert.trim_end()));
        let kept = step(kept, Duration::hours(4) + LIFE);
        assert_eq!(count(&kept.trusted()), 1);
    }

    #[test]
    fn it_is_kept() {
        let now = OffsetDateTime::now_utc();
        let mut kept = Kept::new(now).unwrap();
        assert_eq!(Kept::read(&kept.data()).unwrap(), kept);
        kept.next = Some(make(now).unwrap());
        kept.old = Some(kept.current.cert.clone());
        assert_eq!(Kept::read(&kept.data()).unwrap(), kept);
        let mut data = kept.data();
        data.insert("tls.key".into(), kept.next.unwrap().key);
        assert!(Kept::read(&data).is_err());
        assert!(Kept::read(&BTreeMap::new()).is_err());
    }
}
