//! The CA's Secret, and the ConfigMap by which it is known.

use super::authority::Kept;
use super::{Error, Options};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::ByteString;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
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
    let kept = match secrets.get_opt(&options.secret).await? {
        None => {
            let kept = Kept::new(now)?;
            let secret = write(Secret::default(), &options.secret, &kept);
            // (If another one was quicker, it is found by the next try.)
            secrets.create(&PostParams::default(), &secret).await?;
            tracing::info!("made a CA: Secret {}", options.secret);
            kept
        }
        Some(secret) => {
            let was = read(&secret)?;
            let kept = was.clone().step(now)?;
            if kept != was {
                let secret = write(secret, &options.secret, &kept);
                let version = PostParams::default();
                secrets.replace(&options.secret, &version, &secret).await?;
                tracing::info!("replaced the CA: Secret {}", options.secret);
            }
            kept
        }
    };
    publish(client, options, &kept.trusted()).await?;
    Ok(kept)
}

fn read(secret: &Secret) -> Result<Kept, Error> {
    let data = secret.data.iter().flatten();
    let text = |b: &ByteString| String::from_utf8_lossy(&b.0).into_owned();
    let data = data.map(|(k, v)| (k.clone(), text(v))).collect();
    Ok(Kept::read(&data)?)
}

fn write(mut secret: Secret, name: &str, kept: &Kept) -> Secret {
    secret.metadata.name = Some(name.into());
    let data = kept.data().into_iter();
    secret.data = Some(data.map(|(k, v)| (k, ByteString(v.into_bytes()))).collect());
    secret
}

async fn publish(client: &Client, options: &Options, trusted: &str) -> Result<(), Error> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &options.namespace);
    let data = BTreeMap::from([(CA_FILE.to_owned(), trusted.to_owned())]);
    match maps.get_opt(&options.config_map).await? {
        Some(map) if map.data.as_ref() == Some(&data) => {}
        Some(mut map) => {
            map.data = Some(data);
            let version = PostParams::default();
            maps.replace(&options.config_map, &version, &map).await?;
        }
        None => {
            let map = ConfigMap {
                metadata: ObjectMeta {
                    name: Some(options.config_map.clone()),
                    ..ObjectMeta::default()
                },
                data: Some(data),
                ..ConfigMap::default()
            };
            maps.create(&PostParams::default(), &map).await?;
        }
    }
    Ok(())
}
