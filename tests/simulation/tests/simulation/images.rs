//! Image pulls: credentials, failures and their reports.

use std::collections::BTreeSet;

use quintlet_cri_api::v1;
use quintlet_simulation::{LONG, Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

fn private(name: &str, secrets: &[&str]) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["image"] = json!(format!("private.test/team/{name}:1"));
    pod["spec"]["imagePullSecrets"] = secrets.iter().map(|s| json!({"name": s})).collect();
    pod
}

fn docker_config(user: &str, key: &str) -> String {
    json!({key: {"username": user, "password": format!("{user}-pass")}}).to_string()
}

fn secret(name: &str, kind: &str, key: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "type": kind,
        "metadata": {"name": name, "namespace": "default"}, "stringData": {key: value}})
}

/// Returns the user names presented for a pod's image, in order; empty without credentials.
fn presented(sim: &Sim, pod: &str) -> Vec<String> {
    let image = format!("private.test/team/{pod}:1");
    let calls = sim.runtime.calls_of(Method::PullImage);
    let of_pod = calls.iter().filter(|c| c.subjects.contains(&image));
    of_pod.map(|c| c.request::<v1::PullImageRequest>().auth.unwrap_or_default().username).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pull_secrets_of_the_api_are_tried_in_order_until_one_is_accepted() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.protect("private.test/", "good", "good-pass");
    let json = "kubernetes.io/dockerconfigjson";
    for (name, config) in [
        ("bad", docker_config("bad", "private.test/team")),
        ("good", docker_config("good", "*.test")),
        ("elsewhere", docker_config("elsewhere", "other.test")),
    ] {
        let object = secret(name, json, ".dockerconfigjson", &format!(r#"{{"auths": {config}}}"#));
        sim.api.create("secrets", "default", object).unwrap();
    }
    let old = secret("old", "kubernetes.io/dockercfg", ".dockercfg", &docker_config("good", "private.test"));
    sim.api.create("secrets", "default", old).unwrap();
    let broken = secret("broken", json, ".dockerconfigjson", "{");
    sim.api.create("secrets", "default", broken).unwrap();

    let _uid = sim.create(private("both", &["elsewhere", "good", "bad"]));
    let _uid = sim.create(private("cfg", &["", "absent", "old"]));
    sim.wait_ready("both").await;
    sim.wait_ready("cfg").await;
    assert_eq!(presented(&sim, "both"), ["bad", "good"], "the more specific key first");
    assert_eq!(presented(&sim, "cfg"), ["good"]);
    assert_eq!(sim.warnings("both"), []);
    assert_eq!(sim.warnings("cfg"), [], "a secret that is not there matters only if the pull fails");

    let _uid = sim.create(private("refused", &["bad", "absent"]));
    let _uid = sim.create(private("anonymous", &[]));
    let _uid = sim.create(private("malformed", &["broken"]));
    for (name, text) in [
        ("refused", "401 Unauthorized"),
        ("anonymous", "401 Unauthorized"),
        ("malformed", "image pull secret \"broken\": docker config is malformed"),
    ] {
        sim.wait_pod(name, "backs off", |p| {
            let c = p.container(&format!("c-{name}"));
            c.reason == "ImagePullBackOff" && c.message.contains(text)
        })
        .await;
    }
    sim.wait_event("refused", "the secret that is not there", |e| {
        e.reason == "FailedToRetrieveImagePullSecret"
            && e.message
                == "Unable to retrieve some image pull secrets (absent); attempting to pull the image may not succeed."
    })
    .await;
    assert_eq!(presented(&sim, "refused")[0], "bad");
    assert!(!presented(&sim, "refused").contains(&String::new()), "never anonymous after credentials");
    assert_eq!(presented(&sim, "anonymous")[0], "");
    assert!(presented(&sim, "malformed").is_empty(), "nothing is tried with half of the credentials");
    let all_events = format!("{:?}", sim.api.list("events"));
    assert!(!all_events.contains("-pass"), "no password is reported");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_uses_a_secret_of_the_manifests_and_all_pods_use_the_nodes_file() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.protect("private.test/team/static", "manifest", "manifest-pass");
    sim.runtime.protect("private.test/team/node", "node", "node-pass");
    std::fs::create_dir_all(sim.root_dir()).unwrap();
    let config = format!(r#"{{"auths": {}}}"#, docker_config("node", "private.test"));
    std::fs::write(sim.root_dir().join("config.json"), config).unwrap();
    for service in quintlet_simulation::Service::ALL {
        sim.up(service);
    }
    let config = format!(r#"{{"auths": {}}}"#, docker_config("manifest", "private.test"));
    let object = secret("pull", "kubernetes.io/dockerconfigjson", ".dockerconfigjson", &config);
    sim.manifest("a-secret", &object);
    let mut pod = private("static", &["pull"]);
    pod["spec"].as_object_mut().unwrap().remove("nodeName");
    sim.manifest("static", &pod);
    let _uid = sim.create(private("node", &[]));
    sim.wait_ready("static-sim-node").await;
    sim.wait_ready("node").await;
    assert_eq!(presented(&sim, "static"), ["manifest"]);
    assert_eq!(presented(&sim, "node"), ["node"]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_failure_reason_of_an_image_is_reported_as_by_the_kubelet() {
    let sim = Sim::start(Options::default()).await;
    let image = |name: &str| format!("example.test/{name}:1");
    let pull = |name: &str, text: &str| {
        sim.runtime.script(Rule::on(Method::PullImage).about(&image(name)).fail(Code::Unknown, text));
    };
    pull("err", "no such manifest");
    pull("registry", "RegistryUnavailable: it sleeps");
    pull("signature", "SignatureValidationFailed: forged");
    let inspect = Rule::on(Method::ImageStatus).about(&image("inspect"));
    sim.runtime.script(inspect.fail(Code::Unknown, "database is locked"));
    let cases = [
        ("err", "Always", "ErrImagePull", "no such manifest", "Failed to pull image"),
        (
            "registry",
            "Always",
            "RegistryUnavailable",
            "image pull failed for example.test/registry:1 because the registry is unavailable: it sleeps",
            "Failed to pull image",
        ),
        (
            "signature",
            "Always",
            "SignatureValidationFailed",
            "image pull failed for example.test/signature:1 because the signature validation failed: forged",
            "Failed to pull image",
        ),
        (
            "never",
            "Never",
            "ErrImageNeverPull",
            "Container image \"example.test/never:1\" is not present with pull policy of Never",
            "is not present with pull policy of Never",
        ),
        (
            "inspect",
            "IfNotPresent",
            "ImageInspectError",
            "Failed to inspect image \"\": database is locked",
            "Failed to inspect image \"\": database is locked",
        ),
    ];
    for (name, policy, ..) in cases {
        let mut pod = pods::single(name);
        pod["spec"]["containers"][0]["image"] = json!(image(name));
        pod["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
        let _uid = sim.create(pod);
    }
    let mut invalid = pods::single("invalid");
    invalid["spec"]["containers"][0]["image"] = json!("Not A Name");
    let _uid = sim.create(invalid);
    // Each reason is shown before that of the back-off replaces it.
    let mut shown = BTreeSet::new();
    until("every reason is shown", LONG, async || {
        for (name, _, reason, message, _) in cases {
            let c = sim.pod(name).container(&format!("c-{name}"));
            if c.reason == reason && c.message == message {
                shown.insert(name);
            }
        }
        let missing: Vec<_> = cases.iter().map(|c| c.0).filter(|name| !shown.contains(name)).collect();
        if missing.is_empty() { Ok(()) } else { Err(missing) }
    })
    .await;
    for (name, _, reason, message, event) in cases {
        if reason != "ErrImageNeverPull" && reason != "ImageInspectError" {
            sim.wait_pod(name, "backs off", |p| {
                let c = p.container(&format!("c-{name}"));
                c.reason == "ImagePullBackOff" && c.message.ends_with(&format!("{reason}: {message}"))
            })
            .await;
        }
        sim.wait_event(name, event, |e| e.kind == "Warning" && e.message.contains(event)).await;
        sim.wait_event(name, reason, |e| e.reason == "Failed" && e.message == format!("Error: {reason}"))
            .await;
    }
    sim.wait_pod("invalid", "InvalidImageName", |p| {
        let c = p.container("c-invalid");
        c.reason == "InvalidImageName"
            && c.message
                .starts_with("Failed to apply default image tag \"Not A Name\": couldn't parse image name")
    })
    .await;
    sim.wait_event("invalid", "InspectFailed", |e| e.reason == "InspectFailed").await;
    assert_eq!(sim.runtime.calls_of(Method::CreateContainer).len(), 0);
    sim.finish().await;
}
