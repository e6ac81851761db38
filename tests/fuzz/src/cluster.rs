//! What anybody in a cluster may say: a pod to the webhook, a request for a certificate to the signer.

use crate::input::Input;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::ByteString;
use serde_json::{json, Value};
use underpass_pods::policy::PodsConfig;
use underpass_signer::{judge, Options};
use underpass_webhook::{review, Lookup};

/// Says the same of each namespace.
struct Namespaces(Option<&'static str>);

impl Lookup for Namespaces {
    fn namespace(&self, _: &str) -> Option<String> {
        self.0.map(str::to_owned)
    }

    fn handler(&self, class: &str) -> Option<String> {
        (class == "kata").then(|| "kata-qemu".into())
    }
}

/// An AdmissionReview, behind a byte that says what is configured.
pub(crate) fn review(data: &[u8]) {
    let (how, body) = data.split_first().unwrap_or((&0, &[]));
    let some = |bit: u8, name: &str| match how & bit {
        0 => Vec::new(),
        _ => vec![name.to_owned()],
    };
    let config = PodsConfig {
        include: some(1, "shop"),
        exclude: some(2, "bank"),
        ..PodsConfig::default()
    };
    let word = [None, Some("true"), Some("false"), Some("maybe")][usize::from(how >> 2 & 3)];
    let answer = match review::review(&config, &Namespaces(word), body) {
        Ok(answer) => answer,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let Ok(asked) = serde_json::from_slice::<Value>(body) else {
        return; // what it did not look at is no text
    };
    let response = &answer["response"];
    assert_eq!(answer["kind"], "AdmissionReview");
    assert_eq!(response["allowed"], true);
    assert_eq!(response["uid"], asked["request"]["uid"]);
    let warnings = response["warnings"].as_array();
    for w in warnings.into_iter().flatten() {
        assert!(w.as_str().is_some_and(|w| w.len() <= 250));
    }
    assert!(warnings.is_none_or(|w| w.len() <= 8));
    if let Some(text) = response.get("patch") {
        assert_eq!(response["patchType"], "JSONPatch");
        applied(text, asked["request"]["object"].clone());
    }
}

/// A patch adds to a pod, which stays one.
fn applied(text: &Value, mut pod: Value) {
    let text: ByteString = serde_json::from_value(text.clone()).expect("text");
    let operations: Vec<Value> = serde_json::from_slice(&text.0).expect("a list");
    for o in &operations {
        let path = o["path"].as_str().unwrap_or_default();
        assert!(o["op"] == "add" && path.starts_with("/spec/"), "{o}");
    }
    let patch: json_patch::Patch = serde_json::from_slice(&text.0).expect("a patch");
    json_patch::patch(&mut pod, &patch).expect("it fits");
    serde_json::from_value::<Pod>(pod).expect("a pod");
}

fn options() -> Options {
    Options {
        namespace: "sys".into(),
        secret: "ca".into(),
        config_map: "ca".into(),
        account: "underpass".into(),
    }
}

fn pod(i: &mut Input<'_>) -> Option<Pod> {
    let how = i.u8();
    let node = match how & 3 {
        0 => "b",
        _ => "a",
    };
    let pod = json!({
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"serviceAccountName": "underpass", "nodeName": node, "containers": []},
    });
    let pod = serde_json::from_value(pod).expect("a pod");
    (how & 4 == 0).then_some(pod)
}

/// Which pod there is; the length of a request as the API has it, that, and what is to be signed.
pub(crate) fn csr(data: &[u8]) {
    let mut i = Input(data);
    let pod = pod(&mut i);
    let len = usize::from(i.u16());
    let Ok(mut request) = serde_json::from_slice::<CertificateSigningRequest>(i.bytes(len)) else {
        return;
    };
    request.spec.request = ByteString(i.0.to_vec());
    let o = options();
    let _ = (
        judge::is_answered(&request),
        request.status.as_ref().map(judge::is_approved),
    );
    let asker = match judge::Asker::of(&request) {
        Ok(asker) => asker,
        Err(why) => return assert!(!why.is_empty()),
    };
    match judge::judge(&request, &asker, pod.as_ref(), &o.account) {
        Err(why) => assert!(!why.is_empty()),
        Ok((node, asked)) => {
            let pod = pod.expect("it has judged by it");
            assert_eq!(pod.spec.and_then(|s| s.node_name), Some(node.clone()));
            assert_eq!(asked.name(), Some(node.as_str()));
            let says = |key: &str, value: &str| {
                let extra = request.spec.extra.as_ref();
                let all = extra.and_then(|e| e.get(&format!("authentication.kubernetes.io/{key}")));
                all.map(|v| v.iter().map(String::as_str).collect::<Vec<_>>()) == Some(vec![value])
            };
            assert!(says("pod-uid", "u"), "of another pod");
            assert!(!says("node-name", "c"), "of another node");
        }
    }
    let _ = judge::is_ours(&request, &o);
}
