//! The kubelet's PodResources API on its socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quintlet_kit::{socket, task};
use quintlet_pod_resources_api::v1::pod_resources_lister_client::PodResourcesListerClient;
use quintlet_pod_resources_api::v1alpha1::pod_resources_lister_client::PodResourcesListerClient as AlphaClient;
use quintlet_pod_resources_api::{v1, v1alpha1};
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::json;
use tonic::Code;
use tonic::transport::Channel;

use crate::devices::{DEVICE, start_plugin_with, wait_node, with_devices};
use crate::resource_claims::{DRIVER, allocate_named, create_named_claim, start_driver};

fn path(sim: &Sim) -> PathBuf {
    sim.root_dir().join("pod-resources/kubelet.sock")
}

fn client(sim: &Sim) -> PodResourcesListerClient<Channel> {
    PodResourcesListerClient::new(socket::channel(path(sim)))
}

/// Returns what the containers hold, as `pod/container resource=device`.
async fn listed(sim: &Sim) -> Vec<String> {
    let listed = client(sim).list(v1::ListPodResourcesRequest {}).await.unwrap().into_inner();
    listed.pod_resources.iter().flat_map(shown).collect()
}

fn shown(pod: &v1::PodResources) -> Vec<String> {
    let container = |container: &v1::ContainerResources| {
        let name = format!("{}/{}", pod.name, container.name);
        let devices = container.devices.iter();
        let devices =
            devices.map(|held| format!("{name} {}={}", held.resource_name, held.device_ids.join("+")));
        let claims = container.dynamic_resources.iter().flat_map(|claim| {
            claim.claim_resources.iter().map(|device| {
                let cdi: Vec<&str> = device.cdi_devices.iter().map(|device| device.name.as_str()).collect();
                format!("{name} claim {}: {} {}", claim.claim_name, device.driver_name, cdi.join("+"))
            })
        });
        devices.chain(claims).collect::<Vec<_>>()
    };
    pod.containers.iter().flat_map(container).collect()
}

async fn wait_listed(sim: &Sim, expected: &[&str]) {
    until("the resources of the pods", LONG, async || {
        let seen = listed(sim).await;
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_find_the_devices_and_claims_of_pods_until_they_have_ended_and_after_a_restart() {
    let sim = Sim::start(Options::default()).await;
    let _plugin = start_plugin_with(&sim, &["d1", "d2", "!d3"], |_| {}).await;
    let _driver = start_driver(&sim).await;
    wait_node(&sim, "3", "2").await;
    create_named_claim(&sim, "gpu");
    let mut pod = with_devices("web", 1);
    pod["spec"]["resourceClaims"] = json!([{"name": "device", "resourceClaimName": "gpu"}]);
    pod["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "device"}]);
    let uid = sim.create(pod);
    allocate_named(&sim, "gpu", &[&uid]);
    let _plain = sim.create(pods::single("plain"));
    sim.wait_ready("web").await;
    sim.wait_ready("plain").await;
    let device = format!("web/c-web {DEVICE}=d1");
    let claim = format!("web/c-web claim gpu: {DRIVER} {DRIVER}/claim=gpu");
    assert_eq!(listed(&sim).await, [device.as_str(), claim.as_str()]);
    let mut api = client(&sim);
    let request = |name: &str| v1::GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let found = api.get(request("web")).await.unwrap().into_inner().pod_resources.unwrap();
    assert_eq!(shown(&found), [device.as_str(), claim.as_str()]);
    assert_eq!(found.namespace, "default");
    let found = api.get(request("plain")).await.unwrap().into_inner().pod_resources.unwrap();
    assert_eq!((found.containers.len(), shown(&found).len()), (1, 0));
    let missing = api.get(request("missing")).await.unwrap_err();
    let text = "pod missing in namespace default not found";
    assert_eq!((missing.code(), missing.message()), (Code::Unknown, text));
    let allocatable = api.get_allocatable_resources(v1::AllocatableResourcesRequest {}).await.unwrap();
    let allocatable = allocatable.into_inner();
    let devices: Vec<&String> = allocatable.devices.iter().flat_map(|held| &held.device_ids).collect();
    assert_eq!(devices, ["d1", "d2"]);
    assert!(allocatable.cpu_ids.is_empty() && allocatable.memory.is_empty());
    let mut alpha = AlphaClient::new(socket::channel(path(&sim)));
    let listed = alpha.list(v1alpha1::ListPodResourcesRequest {}).await.unwrap().into_inner();
    let names: Vec<&str> = listed.pod_resources.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(names, ["plain", "web"]);

    sim.kill(Service::PodSync).await;
    sim.up(Service::PodSync);
    until("the socket", LONG, async || {
        client(&sim).list(v1::ListPodResourcesRequest {}).await.map(drop).map_err(|status| status.to_string())
    })
    .await;
    wait_listed(&sim, &[&device, &claim]).await;
    sim.delete("web", None);
    sim.wait_gone("web").await;
    wait_listed(&sim, &[]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_call_without_a_pause_delay_no_pod() {
    let sim = Sim::start(Options::default()).await;
    let _first = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    let is_over = Arc::new(AtomicBool::new(false));
    let mut floods = Vec::new();
    for _ in 0..4 {
        let (mut api, is_over) = (client(&sim), Arc::clone(&is_over));
        floods.push(task::spawn("flood", async move {
            let (mut answered, mut rejected) = (0_usize, 0_usize);
            while !is_over.load(Ordering::Acquire) {
                match api.list(v1::ListPodResourcesRequest {}).await {
                    Ok(_) => answered += 1,
                    Err(status) => {
                        assert_eq!(status.message(), "rejected by rate limit");
                        rejected += 1;
                    }
                }
            }
            (answered, rejected)
        }));
    }
    let uid = sim.create(pods::single("second"));
    sim.wait_ready("second").await;
    sim.assert_started_once("second", &uid);
    is_over.store(true, Ordering::Release);
    let mut all = (0, 0);
    for flood in floods {
        let (answered, rejected) = flood.await.unwrap();
        all = (all.0 + answered, all.1 + rejected);
    }
    assert!(all.0 > 0 && all.1 > 0, "{all:?}");
    sim.finish().await;
}
