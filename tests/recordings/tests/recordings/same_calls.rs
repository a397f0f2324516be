//! Compares our CRI requests with those of a kubelet, field by field, except for the entries of
//! [`differences`].

use std::collections::BTreeSet;
use std::sync::Arc;

use quintlet_recordings::compare::differences;
use quintlet_recordings::facts::{Instances, Names};
use quintlet_recordings::fixture::{self, Fixture, Then};
use quintlet_recordings::runtime::{self, ALLOWED_SYSCTLS, CLUSTER_DNS, CLUSTER_DOMAIN, NODE, RESOLV_CONF};
use quintlet_recordings::settled::{answered, settled};
use quintlet_simulation::{LONG, Options, Service, Sim};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use crate::differences::{KNOWN, matches, of_machine};

#[test]
fn every_spec_was_recorded() {
    let specs: BTreeSet<String> = fixture::specs().unwrap().into_iter().map(|s| s.name).collect();
    let fixtures: BTreeSet<String> = fixture::fixtures().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(specs, fixtures, "see README.md how to record");
    assert!(specs.len() >= 40, "{}", specs.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cri_calls_equal_those_of_a_kubelet() {
    let fixtures = fixture::fixtures().unwrap();
    let sim = start(&fixtures).await;
    for (name, fixture) in &fixtures {
        if fixture::is_static(name) {
            sim.manifest(name, &fixture.pod);
        } else {
            let uid = sim.create(fixture.pod.clone());
            assert!(!uid.is_empty());
        }
    }
    let names: Names = vec![
        (sim.root_dir().display().to_string(), "<root>".to_owned()),
        (sim.pod_logs_dir().display().to_string(), "<logs>".to_owned()),
        (sim.cgroup_root().to_owned(), "<cgroup>".to_owned()),
        (node_ip(&sim).await, "<node-ip>".to_owned()),
    ];
    // All pods have started before the first one terminates: on a busy machine a grace period would be
    // shorter by the time until its stop.
    let mut started = Vec::new();
    for (name, fixture) in &fixtures {
        started.push((name, fixture, start_of(&sim, name, fixture, &names).await));
    }
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for (name, fixture, instances) in started {
        end(&sim, name).await;
        let ours = instances.facts(&sim.runtime).unwrap();
        for difference in differences(&fixture.facts, &ours).into_iter().filter(|d| !of_machine(d)) {
            match KNOWN.iter().position(|known| matches(known, name, &difference)) {
                Some(place) => {
                    used.insert(place);
                }
                None => wrong.push(format!("{name}: {difference}")),
            }
        }
    }
    sim.finish().await;
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    let unused: Vec<_> =
        KNOWN.iter().enumerate().filter(|(n, _)| !used.contains(n)).map(|(_, k)| k.path).collect();
    assert_eq!(unused, [""; 0], "no such difference any more");
}

/// Returns the address in the Node's status.
async fn node_ip(sim: &Sim) -> String {
    let internal_ip = |node: &Value| {
        let all = node["status"]["addresses"].as_array()?;
        let internal = all.iter().find(|a| a["type"] == "InternalIP")?;
        Some(internal["address"].as_str()?.to_owned())
    };
    let node = sim.api.wait_for("nodes", "", NODE, LONG, |node| internal_ip(node).is_some()).await;
    internal_ip(&node).unwrap()
}

/// Starts a node with the configuration of the recording.
async fn start(fixtures: &[(String, Fixture)]) -> Sim {
    let mut sim = Sim::prepare(Options { runtime: runtime::options(), ..Options::default() }).await;
    runtime::prepare(&sim.runtime);
    let resolv_conf = sim.root_dir().with_file_name("resolv.conf");
    std::fs::write(&resolv_conf, RESOLV_CONF).unwrap();
    sim.set_pod_sync_args(&[
        &format!("--resolv-conf={}", resolv_conf.display()),
        &format!("--cluster-dns={CLUSTER_DNS}"),
        &format!("--cluster-domain={CLUSTER_DOMAIN}"),
        &format!("--allowed-unsafe-sysctls={}", ALLOWED_SYSCTLS.join(",")),
    ]);
    let create = |resource: &str, object: Value| {
        let namespace = if resource == "runtimeclasses" { "" } else { "default" };
        sim.api.create(resource, namespace, object).unwrap()
    };
    create(
        "services",
        json!({
            "metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {
                "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": 6443}],
            },
        }),
    );
    if sim.api.get("configmaps", "default", "kube-root-ca.crt").is_none() {
        create("configmaps", json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}));
    }
    for object in fixtures.iter().flat_map(|(_, f)| &f.objects) {
        let kind = object["kind"].as_str().unwrap().to_lowercase();
        let plural = if kind.ends_with('s') { format!("{kind}es") } else { format!("{kind}s") };
        create(&plural, object.clone());
    }
    for service in Service::ALL {
        sim.up(service);
    }
    sim
}

fn name_in_api(name: &str) -> String {
    if fixture::is_static(name) { format!("{name}-{NODE}") } else { name.to_owned() }
}

/// Returns the pod as in the API server, with the UID that the runtime has.
fn pod(sim: &Sim, name: &str) -> Value {
    let mut pod = Arc::unwrap_or_clone(sim.pod(&name_in_api(name)).0);
    if fixture::is_static(name) {
        // The mirror pod has another UID.
        pod["metadata"]["uid"] = pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].clone();
    }
    pod
}

/// Waits for a pod's start, causes the event after it, and waits for its requests.
async fn start_of(sim: &Sim, name: &str, fixture: &Fixture, names: &Names) -> Instances {
    let now = until(&format!("{name} has started"), LONG, async || {
        let pod = pod(sim, name);
        match settled(&sim.runtime, &pod) {
            Ok(()) => Ok(pod),
            Err(missing) => Err((missing, pod["status"].clone(), sim.events(name))),
        }
    })
    .await;
    let uid = now["metadata"]["uid"].as_str().unwrap();
    match &fixture.then {
        Some(Then::Exit(container)) => {
            let newest = sim.runtime.newest(uid, container).unwrap();
            assert!(sim.runtime.exit(newest.id(), 1));
        }
        Some(Then::Patch { subresource, patch }) => {
            sim.api
                .edit(&format!("pods/{subresource}"), "default", name, |pod| pod["spec"] = patch.clone())
                .unwrap();
        }
        Some(Then::Restarted(_)) | None => {}
    }
    if let Some(then) = &fixture.then {
        until(&format!("{name} has answered"), LONG, async || answered(&sim.runtime, &pod(sim, name), then))
            .await;
    }
    Instances::of(&sim.runtime, uid, names)
}

async fn end(sim: &Sim, name: &str) {
    if fixture::is_static(name) {
        sim.remove_manifest(name);
    } else {
        sim.delete(name, None);
    }
    sim.wait_gone(&name_in_api(name)).await;
}
