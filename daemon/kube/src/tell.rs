//! Events.

use super::Event;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{self, EventType, Recorder, Reporter};
use kube::Client;
use tokio::sync::mpsc::Receiver;

/// Who tells it.
const CONTROLLER: &str = "underpass.io/underpassd";

/// For ever: tells what it is given.
pub(super) async fn events(client: Client, node: &str, events: &mut Receiver<Event>) {
    let reporter = Reporter {
        controller: CONTROLLER.into(),
        instance: Some(node.into()),
    };
    // (It counts repetitions of an event instead of telling it again.)
    let recorder = Recorder::new(client, reporter);
    while let Some(event) = events.recv().await {
        let pod = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(event.pod.clone()),
            namespace: Some(event.namespace.clone()),
            uid: Some(event.uid.clone()),
            field_path: Some(format!("spec.containers{{{}}}", event.container)),
            ..ObjectReference::default()
        };
        let about = events::Event {
            type_: EventType::Warning,
            reason: "UnderpassNotInjected".into(),
            note: Some(format!(
                "container {} asked for Underpass and does not get it: {}",
                event.container, event.message
            )),
            action: "Inject".into(),
            secondary: None,
        };
        if let Err(e) = recorder.publish(&about, &pod).await {
            tracing::warn!("Kubernetes API, events: {e}");
        }
    }
}
