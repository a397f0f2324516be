//! A private containerd with real processes. Needs root, containerd, runc, CNI plugins and busybox
//! (scripts/install.sh).
#![allow(clippy::disallowed_methods, clippy::large_futures, clippy::print_stdout, clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::*;
use quintlet_localnode::{Containerd, Options, images};
use quintlet_test_runtime::Faults as _;
use tokio::time::Instant;
use tonic::transport::Channel;

type Client = RuntimeServiceClient<Channel>;

fn sandbox_config(node: &Containerd, name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("{name}-uid"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        log_directory: node.dir().join("logs").display().to_string(),
        port_mappings: vec![PortMapping {
            protocol: Protocol::Tcp as i32,
            container_port: 80,
            host_port: 30_000
                + i32::from(node.names().subnet().split('.').nth(2).unwrap().parse::<u8>().unwrap()),
            host_ip: "127.0.0.1".to_owned(),
        }],
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/kubepods/pod-{name}", node.cgroup_root()),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

/// Runs a pod that serves HTTP. Returns sandbox, container and address.
async fn run_pod(client: &mut Client, node: &Containerd, name: &str) -> (String, String, String) {
    let config = sandbox_config(node, name);
    let run = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let sandbox = client.run_pod_sandbox(run).await.unwrap().into_inner().pod_sandbox_id;
    let command = "echo hello > /tmp/index.html; exec httpd -f -p 80 -h /tmp";
    let container = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "web".to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: images::BUSYBOX.to_owned(), ..ImageSpec::default() }),
        command: ["sh", "-c", command].map(str::to_owned).to_vec(),
        log_path: "web.log".to_owned(),
        labels: HashMap::new(),
        ..ContainerConfig::default()
    };
    let create = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container),
        sandbox_config: Some(config),
    };
    let container = client.create_container(create).await.unwrap().into_inner().container_id;
    client.start_container(StartContainerRequest { container_id: container.clone() }).await.unwrap();
    let status = PodSandboxStatusRequest { pod_sandbox_id: sandbox.clone(), verbose: false };
    let status = client.pod_sandbox_status(status).await.unwrap().into_inner().status.unwrap();
    (sandbox, container, status.network.unwrap().ip)
}

/// Retries until the page is served.
async fn page(ip: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut last = String::new();
    while Instant::now() < deadline {
        let page = async {
            let mut stream = tokio::net::TcpStream::connect((ip, 80)).await?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await?;
            std::io::Result::Ok(reply)
        };
        match page.await {
            Ok(reply) => return reply,
            Err(e) => last = e.to_string(),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no page from {ip}: {last}");
}

async fn running(client: &mut Client, container: &str) -> bool {
    let request = ContainerStatusRequest { container_id: container.to_owned(), verbose: false };
    let status = client.container_status(request).await.unwrap().into_inner().status.unwrap();
    status.state() == ContainerState::ContainerRunning
}

#[tokio::test]
async fn a_pod_runs_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut took = Vec::new();
    let began = Instant::now();
    let mut options = Options::new(dir.path().join("node"));
    options.masquerade = true;
    options.owned = vec![dir.path().join("kubelet")];
    let mut node = Containerd::start(options).await.unwrap();
    took.push(("start", began.elapsed()));
    let began = Instant::now();
    let names = node.import_local_images().await.unwrap();
    took.push(("import", began.elapsed()));
    assert_eq!(names, [images::PAUSE, images::BUSYBOX]);
    let began = Instant::now();
    node.import_local_images().await.unwrap();
    took.push(("import again", began.elapsed()));

    println!("{}", quintlet_localnode::cri::version(node.channel().await.unwrap()).await.unwrap());
    let mut client = Client::new(node.channel().await.unwrap());
    let began = Instant::now();
    let (_, container, ip) = run_pod(&mut client, &node, "web").await;
    took.push(("first pod", began.elapsed()));
    let began = Instant::now();
    run_pod(&mut client, &node, "other").await;
    took.push(("second pod", began.elapsed()));
    assert!(page(&ip).await.contains("hello"));

    let began = Instant::now();
    node.kill9().await;
    node.launch().await.unwrap();
    took.push(("start again", began.elapsed()));
    assert!(running(&mut client, &container).await, "a pod did not survive its containerd");
    node.restart().await.unwrap();
    assert!(running(&mut client, &container).await, "a pod did not survive a restart of containerd");

    node.pause().await;
    let answered = tokio::time::timeout(Duration::from_millis(200), running(&mut client, &container)).await;
    assert!(answered.is_err(), "a paused containerd answered");
    node.resume();
    assert!(running(&mut client, &container).await);

    let during = node.leftovers();
    for kind in ["process", "mount", "interface", "iptables rule", "iptables chain", "cgroup"] {
        assert!(during.iter().any(|l| l.starts_with(kind)), "no {kind} found while a pod runs: {during:#?}");
    }
    let traces = node.traces();
    let began = Instant::now();
    node.down().await.unwrap();
    took.push(("down", began.elapsed()));
    assert_eq!(traces.leftovers(), Vec::<String>::new());
    assert!(!dir.path().join("kubelet").exists());
    for (what, time) in took {
        println!("{what}: {} ms", time.as_millis());
    }
}

#[tokio::test]
async fn a_dropped_instance_leaves_nothing_even_with_containerd_dead() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(dir.path().join("node"));
    options.masquerade = true;
    let mut node = Containerd::start(options).await.unwrap();
    node.import_local_images().await.unwrap();
    let mut client = Client::new(node.channel().await.unwrap());
    run_pod(&mut client, &node, "orphan").await;
    node.kill9().await;
    let traces = node.traces();
    drop(node);
    assert_eq!(traces.leftovers(), Vec::<String>::new());
}

#[tokio::test]
async fn kept_pods_are_taken_over_and_an_owner_that_does_not_keep_them_removes_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(dir.path().join("node"));
    options.keep_pods = true;
    let node = Containerd::start(options.clone()).await.unwrap();
    node.import_local_images().await.unwrap();
    let mut client = Client::new(node.channel().await.unwrap());
    let (_, container, ip) = run_pod(&mut client, &node, "kept").await;
    let traces = node.traces();
    node.stop().await;
    assert!(page(&ip).await.contains("hello"));

    let node = Containerd::start(options.clone()).await.unwrap();
    let mut client = Client::new(node.channel().await.unwrap());
    assert!(running(&mut client, &container).await);
    node.stop().await;

    options.keep_pods = false;
    Containerd::start(options).await.unwrap().down().await.unwrap();
    assert_eq!(traces.leftovers(), Vec::<String>::new());
}

/// Returns the writable network sysctls of this thread's namespace.
fn sysctls() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![PathBuf::from("/proc/sys/net")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                dirs.push(entry.path());
            } else if !entry.path().ends_with("nf_conntrack_count")
                && let Ok(value) = std::fs::read_to_string(entry.path())
            {
                found.insert(entry.path(), value);
            }
        }
    }
    found
}

#[test]
fn sysctls_are_restored_when_the_last_instance_stops() {
    const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";
    // Runs in a network namespace of this thread, where no other process changes settings.
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    assert!(std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    std::fs::write(FORWARD, "0").unwrap();
    let before = sysctls();
    let forward = || std::fs::read_to_string(FORWARD).unwrap().trim().to_owned();
    // Its threads are in the same namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let start = async |name: &str| {
            let mut options = Options::new(dir.path().join(name));
            options.masquerade = true;
            Containerd::start(options).await.unwrap()
        };
        let first = start("first").await;
        first.import_local_images().await.unwrap();
        let mut client = Client::new(first.channel().await.unwrap());
        run_pod(&mut client, &first, "web").await;
        assert_eq!(forward(), "1", "the bridge plugin turns it on");
        let second = start("second").await;
        first.down().await.unwrap();
        assert_eq!(forward(), "1", "the second still needs it");
        // Simulates an instance whose owner was killed, before the next one detects it.
        drop(second);
        assert_eq!(forward(), "0");
    });
    let after = sysctls();
    let changed: Vec<_> =
        before.iter().filter(|(name, value)| after.get(*name).is_some_and(|v| v != *value)).collect();
    assert!(changed.is_empty(), "changed: {changed:#?}");
}
