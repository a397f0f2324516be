//! `/stats/summary` and `/metrics/cadvisor` with a runtime in memory.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::StatusCode;
use node_api_access::limits::Limits;
use node_api_base::answer::Answer;
use node_api_base::services::Services;
use node_api_statistics::{Stats, StatsPaths};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_testkit::fake_runtime::{FakeRuntime, Method};
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::Code;

use crate::common::{Api, TEST_TIMEOUT};

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

async fn summary(api: &Api, query: &str) -> Value {
    let (code, body) = api.get(&format!("/stats/summary{query}"), None).await;
    assert_eq!(code, StatusCode::OK, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_are_as_pod_sync_measured_them() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let pod = summary(&api, "").await["pods"][0].clone();
    let volume = &pod["volume"][0];
    assert_eq!((&volume["name"], &volume["usedBytes"]), (&json!("scratch"), &json!(4096)));
    assert_eq!(volume["time"], "1970-01-01T00:00:01Z");
    assert_eq!(pod["ephemeral-storage"]["usedBytes"], 4096 + 512, "with the file of hosts");
    assert_eq!(volume.get("pvcRef"), None);
    let claimed = &pod["volume"][1];
    assert_eq!(claimed["pvcRef"], json!({"name": "c1", "namespace": "default"}));
    let light = summary(&api, "?only_cpu_and_memory=true").await["pods"][0].clone();
    assert_eq!((&light["volume"], &light["ephemeral-storage"]), (&Value::Null, &Value::Null));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_pod_statistics_container_statistics_are_read() {
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    for method in [Method::ListPodSandboxStats, Method::StreamPodSandboxStats] {
        runtime.fail(method, Code::Unimplemented, "not here", u32::MAX);
    }
    let pods = summary(&api, "").await["pods"].clone();
    assert_eq!(pods[0]["podRef"], json!({"name": "web", "namespace": "default", "uid": "u1"}));
    assert_eq!(pods[0]["containers"][0]["name"], "main", "{pods}");
    assert_eq!(pods.as_array().unwrap().len(), 1);
    for method in [Method::ListContainerStats, Method::StreamContainerStats] {
        runtime.fail(method, Code::Unavailable, "broken", u32::MAX);
    }
    // The last summary is served for a second.
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let (code, body) = api.get("/stats/summary", None).await;
        if (code.as_u16(), body.as_str()) == (500, "Internal Error: broken\n") {
            return;
        }
        assert!(Instant::now() < deadline, "{code}: {body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usage_of_claims_is_in_the_metrics() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let (code, page) = api.get("/metrics", None).await;
    let line = "kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"c1\"} 8192\n";
    assert!(code == StatusCode::OK && page.contains(line), "{page}");
    assert!(!page.contains("scratch"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_pages_of_pods_read_whole_pods() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    for (path, reads_whole_pods) in [
        ("/stats/summary", false),
        ("/metrics/resource", false),
        ("/metrics/cadvisor", false),
        ("/pods", true),
    ] {
        api.watched.lock().clear();
        let (code, body) = api.get(path, None).await;
        assert_eq!(code, StatusCode::OK, "{path}: {body}");
        let watched = api.watched.lock();
        let whole = watched.iter().map(|request| !request.for_statistics && !request.brief);
        assert_eq!(whole.collect::<Vec<_>>(), [reads_whole_pods], "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_the_same_time_share_one_gathering() {
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    for path in ["/stats/summary", "/metrics/resource", "/metrics/cadvisor"] {
        runtime.forget_calls();
        let all = (0..20).map(|_| api.get(path, None));
        for (code, body) in futures::future::join_all(all).await {
            assert_eq!(code, StatusCode::OK, "{path}: {body}");
        }
        let calls = runtime.count(Method::ListPodSandboxStats) + runtime.count(Method::StreamPodSandboxStats);
        // A slow machine may take more than a second for twenty requests.
        assert!((1..=4).contains(&calls), "{path}: {calls}");
    }
}

/// Reads a FIFO in the place of a file of cgroupfs, which waits for its other end. The only thread of the
/// runtime has to work meanwhile, and opens the other end.
#[tokio::test]
async fn statistics_are_read_on_a_thread_for_blocking_work() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let node = Services::new(Paths::new(&api.dir.path().join("run")));
    let cgroups = api.dir.path().join("cgroup");
    std::fs::create_dir(&cgroups).unwrap();
    std::fs::write(cgroups.join("cgroup.controllers"), "memory").unwrap();
    let fifo = cgroups.join("memory.stat");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let paths = StatsPaths { cgroups, cgroup_root: "/".to_owned(), ..StatsPaths::default() };
    let stats = Arc::new(Stats::new("n1".to_owned(), paths, Clock::system()));
    type Page<'a> = std::pin::Pin<Box<dyn Future<Output = Answer> + 'a>>;
    let pages: [(&str, Page<'_>); 3] = [
        ("/stats/summary", Box::pin(stats.summary(&node, false))),
        ("/metrics/resource", Box::pin(stats.resource(&node))),
        ("/metrics/cadvisor", Box::pin(stats.cadvisor(&node))),
    ];
    for (path, page) in pages {
        let (free, freed) = std::sync::mpsc::channel::<()>();
        let is_done = Arc::new(AtomicBool::new(false));
        let (fifo, stop) = (fifo.clone(), is_done.clone());
        let writer = std::thread::spawn(move || {
            let mut blocked = 0;
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
                // Succeeds while the page reads.
                let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
                let opened = std::fs::OpenOptions::new().write(true).custom_flags(flags).open(&fifo);
                let Ok(mut end) = opened else { continue };
                while freed.try_recv().is_ok() {}
                // The runtime works while the page reads, unless its thread is the one that does.
                blocked += u32::from(freed.recv_timeout(TEST_TIMEOUT).is_err());
                end.write_all(b"anon 1\nfile 1\ninactive_file 1\n").unwrap();
            }
            blocked
        });
        let ticking = async {
            loop {
                let _ = free.send(());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let answer = tokio::select! {
            answer = page => answer,
            () = ticking => unreachable!(),
        };
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        assert_eq!(writer.join().unwrap(), 0, "{path} is read on the runtime's thread");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_are_listed_for_cadvisor_only_if_their_statistics_do_not_have_them() {
    let lists_of_a_scrape = async |api: &Api, runtime: &FakeRuntime| {
        runtime.forget_calls();
        let (code, page) = api.get("/metrics/cadvisor", None).await;
        assert_eq!(code, StatusCode::OK, "{page}");
        [Method::ListPodSandbox, Method::StreamPodSandboxes].map(|method| runtime.count(method))
    };
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    assert_eq!(lists_of_a_scrape(&api, &runtime).await, [0, 0]);
    // Another node, since a page is served again for a second.
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    for method in [Method::ListPodSandboxStats, Method::StreamPodSandboxStats] {
        runtime.fail(method, Code::Unimplemented, "not here", u32::MAX);
    }
    assert_eq!(lists_of_a_scrape(&api, &runtime).await, [1, 0]);
}
