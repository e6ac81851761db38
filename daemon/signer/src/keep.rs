//! The CA's Secret, and the ConfigMap by which it is known.

use super::authority::Kept;
use super::{Error, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::ByteString;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use std::collections::BTreeMap;
use time::OffsetDateTime;
use underpass_kube::CA_FILE;

/// Makes the CA if there is none, replaces it when it is time, and makes it known. What signs from now on.
pub(super) async fn tend(
    client: &Client,
    options: &Options,
    now: OffsetDateTime,
) -> Result<Kept, Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &options.namespace);
    let secret = secrets.get(&options.secret).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &options.namespace);
    let map = maps.get(&options.config_map).await?;
    let known = map.data.as_ref().and_then(|d| d.get(CA_FILE));
    let known = known.map_or("", String::as_str);
    let (was, kept) = match secret.data.as_ref().is_none_or(|d| d.is_empty()) {
        true => (None, Kept::new(now)?),
        false => {
            let was = read(&secret)?;
            (Some(was.clone()), was.step(known, now)?)
        }
    };
    if was.as_ref() != Some(&kept) {
        let secret = write(secret, &kept);
        let version = PostParams::default();
        // (If another one was quicker, this fails, and its CA is found by the next try.)
        secrets.replace(&options.secret, &version, &secret).await?;
        let what = if was.is_none() { "a new" } else { "another" };
        tracing::info!("{what} CA is in Secret {}", options.secret);
    }
    publish(&maps, map, &kept.trusted()).await?;
    Ok(kept)
}

fn read(secret: &Secret) -> Result<Kept, Error> {
    let data = secret.data.iter().flatten();
    let text = |b: &ByteString| String::from_utf8_lossy(&b.0).into_owned();
    let data = data.map(|(k, v)| (k.clone(), text(v))).collect();
    Ok(Kept::read(&data)?)
}

fn write(mut secret: Secret, kept: &Kept) -> Secret {
    let data = kept.data().into_iter();
    secret.data = Some(data.map(|(k, v)| (k, ByteString(v.into_bytes()))).collect());
    secret
}

async fn publish(maps: &Api<ConfigMap>, mut map: ConfigMap, trusted: &str) -> Result<(), Error> {
    let data = BTreeMap::from([(CA_FILE.to_owned(), trusted.to_owned())]);
    if map.data.as_ref() != Some(&data) {
        map.data = Some(data);
        let name = map.name_any();
        maps.replace(&name, &PostParams::default(), &map).await?;
    }
    Ok(())
}
