//! A node that joins with a bootstrap token, and the rotation of its certificates.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testapi::{SignerAnswer, TestSigner};
use quintlet_testkit::wait::until;
use serde_json::Value;

const PLURAL: &str = "certificatesigningrequests";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const SERVING: &str = "kubernetes.io/kubelet-serving";
const HOUR: Duration = Duration::from_secs(3600);

/// A node whose kubeconfig does not exist yet.
struct Joining {
    sim: Sim,
    signer: TestSigner,
}

impl Joining {
    async fn prepare(more: &[&str]) -> Self {
        let mut sim = Sim::prepare(Options::default()).await;
        let beside = |name: &str| sim.root_dir().with_file_name(name);
        std::fs::rename(beside("kubeconfig"), beside("bootstrap.conf")).unwrap();
        let bootstrap = format!("--bootstrap-kubeconfig={}", beside("bootstrap.conf").display());
        let directory = format!("--cert-dir={}", beside("pki").display());
        sim.set_pod_sync_args(&[&[bootstrap.as_str(), &directory], more].concat());
        Self { sim, signer: TestSigner::new() }
    }

    fn current(&self, purpose: &str) -> Option<PathBuf> {
        let pki = self.sim.root_dir().with_file_name("pki");
        std::fs::read_link(pki.join(format!("{purpose}-current.pem"))).ok()
    }

    fn requests(&self, signer: &str) -> usize {
        self.sim.api.list(PLURAL).iter().filter(|request| request["spec"]["signerName"] == signer).count()
    }

    fn is_ready(&self) -> Result<(), Value> {
        let node = self.sim.api.get("nodes", "", NODE).unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        if conditions.iter().any(is_ready) { Ok(()) } else { Err(node["status"]["conditions"].clone()) }
    }

    /// Signs all requests until `wanted` holds.
    async fn sign_until(&self, what: &str, life: Duration, wanted: impl Fn() -> Result<(), Value>) {
        until(what, LONG, async || {
            self.signer.answer_all(&self.sim.api, Timestamp::now(), life);
            wanted()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_joins_with_a_bootstrap_token_and_runs_static_pods_meanwhile() {
    let node = Joining::prepare(&["--rotate-server-certificates"]).await;
    node.sim.manifest("early", &pods::single("early"));
    node.sim.start_all();
    until("the request", LONG, async || if node.requests(CLIENT) == 1 { Ok(()) } else { Err(()) }).await;
    node.sim.wait_runtime("the static pod runs", |runtime| !runtime.containers().is_empty()).await;
    assert!(node.sim.api.get("nodes", "", NODE).is_none());
    // A kill at this point continues with the same request.
    node.sim.restart(Service::PodSync).await;
    node.sign_until("the node is ready", HOUR, || node.is_ready()).await;
    assert_eq!(node.requests(CLIENT), 1);
    let _uid = node.sim.create(pods::single("web"));
    node.sim.wait_ready("web").await;
    node.sign_until("a serving certificate", HOUR, || match node.current("kubelet-server") {
        Some(_) => Ok(()),
        None => Err(Value::Null),
    })
    .await;
    assert_eq!(node.requests(SERVING), 1);
    node.sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_a_minute_are_rotated_while_pods_start_and_a_denial_changes_nothing() {
    const MINUTE: Duration = Duration::from_secs(60);
    let node = Joining::prepare(&["--rotate-certificates"]).await;
    node.sim.start_all();
    node.sign_until("the node is ready", MINUTE, || node.is_ready()).await;
    for number in 1..=3 {
        let name = format!("p{number}");
        let _uid = node.sim.create(pods::single(&name));
        node.sim.wait_ready(&name).await;
        let before = node.current("kubelet-client");
        if number == 2 {
            node.signer.script(&[SignerAnswer::Deny, SignerAnswer::WrongName]);
            node.sim.disturb();
        }
        node.sign_until("a rotation", MINUTE, || {
            let current = node.current("kubelet-client");
            if current == before { Err(format!("{current:?}").into()) } else { Ok(()) }
        })
        .await;
    }
    let _uid = node.sim.create(pods::single("last"));
    node.sim.wait_ready("last").await;
    assert_eq!(node.requests(CLIENT), 1 + 3 + 2);
    let failed: Vec<String> = node
        .sim
        .log()
        .iter()
        .filter(|line| line["msg"].as_str().is_some_and(|text| text.contains("certificate")))
        .map(|line| line["error"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed[0].contains("is denied") && failed[1].contains("system:node:other"), "{failed:?}");
    node.sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_is_behind_joins_with_a_certificate_whose_life_has_not_begun() {
    let node = Joining::prepare(&["--rotate-certificates"]).await;
    node.sim.start_all();
    let start = Timestamp::now() + HOUR;
    until("the node is ready", LONG, async || {
        node.signer.answer_all(&node.sim.api, start, HOUR);
        node.is_ready()
    })
    .await;
    assert_eq!(node.requests(CLIENT), 1);
    let _uid = node.sim.create(pods::single("web"));
    node.sim.wait_ready("web").await;
    assert_eq!(node.requests(CLIENT), 1);
    node.sim.finish().await;
}

/// Changes of files of a bootstrap, in order, with their number among those of their kind.
const BOOTSTRAP: [(&str, usize); 7] = [
    ("certificate key written", 1),
    ("certificate written", 1),
    ("certificate file removed", 1),
    ("certificate linked", 1),
    ("certificate in use", 1),
    ("kubeconfig written", 1),
    ("certificate file removed", 2),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bootstrap_that_is_killed_at_any_change_of_a_file_continues_with_the_same_request() {
    let node = Joining::prepare(&[]).await;
    node.sim.start_all();
    node.sign_until("the node is ready", HOUR, || node.is_ready()).await;
    let [kubeconfig, pki] = ["kubeconfig", "pki"].map(|name| node.sim.root_dir().with_file_name(name));
    for when in [When::Before, When::After] {
        for (kind, number) in BOOTSTRAP {
            node.sim.kill(Service::PodSync).await;
            std::fs::remove_file(&kubeconfig).unwrap();
            std::fs::remove_dir_all(&pki).unwrap();
            let requested = node.requests(CLIENT);
            node.sim.cuts().arm(Kind::File, when, Some(CutPoint { kind: kind.to_owned(), number }));
            node.sim.up(Service::PodSync);
            node.sign_until(&format!("the kill {when:?} {kind}"), HOUR, || match node.sim.cuts().last() {
                Some(_) => Ok(()),
                None => Err(Value::Null),
            })
            .await;
            node.sim.restart(Service::PodSync).await;
            node.sign_until(&format!("the bootstrap after a kill {when:?} {kind}"), HOUR, || {
                match (kubeconfig.exists(), node.current("kubelet-client")) {
                    (true, Some(_)) => Ok(()),
                    (has_kubeconfig, link) => Err(format!("{has_kubeconfig} {link:?}").into()),
                }
            })
            .await;
            assert_eq!(node.requests(CLIENT), requested + 1, "{when:?} {kind}");
            node.sim.cuts().disarm();
        }
    }
    let _uid = node.sim.create(pods::single("web"));
    node.sim.wait_ready("web").await;
    node.sim.finish().await;
}
