//! Who asks, and for which node he may.

use super::Options;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestStatus,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use underpass_admin::certificate::valid_name;
use underpass_certificates::Request;
use underpass_kube::USAGES;

/// What the API server writes of the pod to which the asker's token is bound.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
/// The node of that pod; since Kubernetes 1.30.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// The pod that asks, as the API server knows it.
#[derive(Debug, PartialEq)]
pub struct Asker {
    pub pod: String,
    uid: String,
    node: Option<String>,
}

fn has(status: &CertificateSigningRequestStatus, type_: &str) -> bool {
    let all = status.conditions.iter().flatten();
    all.clone().any(|c| c.type_ == type_)
}

pub fn is_approved(status: &CertificateSigningRequestStatus) -> bool {
    has(status, "Approved")
}

/// Is there nothing left to do?
pub fn is_answered(request: &CertificateSigningRequest) -> bool {
    request.status.as_ref().is_some_and(|s| {
        s.certificate.as_ref().is_some_and(|c| !c.0.is_empty())
            || has(s, "Denied")
            || has(s, "Failed")
    })
}

/// Was it made by the account of our nodes' daemons? (The API server writes who made it.)
pub fn is_ours(request: &CertificateSigningRequest, o: &Options) -> bool {
    let wanted = format!("system:serviceaccount:{}:{}", o.namespace, o.account);
    request.spec.username == Some(wanted)
}

impl Asker {
    /// `Err`: it is not a daemon of a node that asks.
    pub fn of(request: &CertificateSigningRequest) -> Result<Asker, String> {
        let said = |key: &str| {
            let all = request.spec.extra.as_ref()?.get(key)?;
            match &**all {
                [one] => Some(one.clone()),
                _ => None,
            }
        };
        let (Some(pod), Some(uid)) = (said(POD_NAME), said(POD_UID)) else {
            return Err("the token is not bound to a pod".into());
        };
        let node = said(NODE_NAME);
        Ok(Asker { pod, uid, node })
    }
}

/// The node, and the key to sign, if what is asked for is a certificate of the node that the asker runs on. `pod`: that of
/// the asker's name.
pub fn judge(
    request: &CertificateSigningRequest,
    asker: &Asker,
    pod: Option<&Pod>,
    account: &str,
) -> Result<(String, Request), String> {
    let pod = pod.filter(|p| p.uid().as_deref() == Some(&asker.uid));
    let pod = pod.ok_or("the pod is gone")?;
    let spec = pod.spec.as_ref().ok_or("the pod is not described")?;
    if spec.service_account_name.as_deref() != Some(account) {
        return Err("the pod has another account".into());
    }
    let node = spec.node_name.as_deref().ok_or("the pod has no node")?;
    if asker.node.as_deref().is_some_and(|n| n != node) {
        return Err("the token is of another node".into());
    }
    let other = request.spec.usages.iter().flatten();
    if let Some(other) = other.clone().find(|u| !USAGES.contains(&u.as_str())) {
        return Err(format!("a node's key is not for `{other}`"));
    }
    let text = std::str::from_utf8(&request.spec.request.0).map_err(|e| e.to_string())?;
    let asked = Request::read(text).map_err(|e| e.to_string())?;
    match asked.name() {
        Some(n) if n == node && valid_name(n) => Ok((node.to_owned(), asked)),
        Some(n) => Err(format!("it asks for `{n}`, its pod runs on `{node}`")),
        None => Err("it does not ask for one DNS name, its node's".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn options() -> Options {
        Options {
            namespace: "sys".into(),
            secret: "ca".into(),
            config_map: "ca".into(),
            account: "underpass".into(),
        }
    }

    fn request(csr: &str, change: impl FnOnce(&mut Value)) -> CertificateSigningRequest {
        let mut v = json!({
            "metadata": {"name": "r"},
            "spec": {
                "request": "", "signerName": super::super::SIGNER, "usages": USAGES,
                "username": "system:serviceaccount:sys:underpass",
                "extra": {POD_NAME: ["p"], POD_UID: ["u"]},
            },
        });
        change(&mut v);
        let mut r: CertificateSigningRequest = serde_json::from_value(v).unwrap();
        r.spec.request.0 = csr.as_bytes().to_vec();
        r
    }

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut v = json!({
            "metadata": {"name": "p", "uid": "u"},
            "spec": {"serviceAccountName": "underpass", "nodeName": "a", "containers": []},
        });
        change(&mut v);
        serde_json::from_value(v).unwrap()
    }

    fn verdict(r: &CertificateSigningRequest, p: Option<&Pod>) -> Result<String, String> {
        let o = options();
        if !is_ours(r, &o) {
            return Err("not ours".into());
        }
        let asker = Asker::of(r)?;
        judge(r, &asker, p, &o.account).map(|(node, _)| node)
    }

    #[test]
    fn the_node_of_the_pod_and_no_other() {
        let (a, _) = Request::make("a").unwrap();
        let (b, _) = Request::make("b").unwrap();
        let right = pod(|_| {});
        let no = |r: &CertificateSigningRequest, p: Option<&Pod>, why: &str| {
            let said = verdict(r, p).unwrap_err();
            assert!(said.contains(why), "{said}");
        };
        let ok = request(&a, |_| {});
        assert_eq!(verdict(&ok, Some(&right)).unwrap(), "a");
        no(&request(&b, |_| {}), Some(&right), "runs on `a`");
        no(&ok, None, "gone");
        no(
            &ok,
            Some(&pod(|p| p["metadata"]["uid"] = json!("v"))),
            "gone",
        );
        let other = pod(|p| p["spec"]["serviceAccountName"] = json!("x"));
        no(&ok, Some(&other), "another account");
        no(
            &ok,
            Some(&pod(|p| p["spec"]["nodeName"] = Value::Null)),
            "no node",
        );
        no(&request("x", |_| {}), Some(&right), "no usable request");
        let user = |n: &str| request(&a, |r| r["spec"]["username"] = json!(n));
        no(
            &user("system:serviceaccount:x:underpass"),
            Some(&right),
            "not ours",
        );
        no(&user("admin"), Some(&right), "not ours");
        let bound = request(&a, |r| r["spec"]["extra"] = json!({POD_NAME: ["p"]}));
        no(&bound, Some(&right), "not bound");
        let two = request(&a, |r| r["spec"]["extra"][POD_UID] = json!(["u", "v"]));
        no(&two, Some(&right), "not bound");
        let moved = request(&a, |r| r["spec"]["extra"][NODE_NAME] = json!(["b"]));
        no(&moved, Some(&right), "another node");
        let use_ = request(&a, |r| r["spec"]["usages"] = json!(["cert sign"]));
        no(&use_, Some(&right), "cert sign");
    }

    #[test]
    fn what_is_answered_is_left_alone() {
        let (a, _) = Request::make("a").unwrap();
        let with = |status: Value| request(&a, |r| r["status"] = status);
        assert!(!is_answered(&with(json!({}))));
        assert!(!is_answered(&with(json!({"certificate": ""}))));
        let cond = |t: &str| json!({"conditions": [{"type": t, "status": "True"}]});
        assert!(!is_answered(&with(cond("Approved"))));
        assert!(is_approved(&with(cond("Approved")).status.unwrap()));
        assert!(is_answered(&with(cond("Denied"))));
        assert!(is_answered(&with(cond("Failed"))));
        assert!(is_answered(&with(json!({"certificate": "eA=="}))));
    }
}
