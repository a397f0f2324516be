//! Pods, limits and metrics, and the socket with clients that misbehave.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use quintlet_kit::socket;
use quintlet_pod_resources_api::v1::pod_resources_lister_client::PodResourcesListerClient;
use quintlet_pod_resources_api::v1alpha1::pod_resources_lister_client::PodResourcesListerClient as AlphaClient;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::{Channel, Endpoint, Uri};

use super::*;
use crate::test_pods::{Checkpoints, GPU, TestPods, view, with_phase};

struct Served {
    api: PodResourcesApi,
    pods: Arc<TestPods>,
    clock: Clock,
    _dir: TempDir,
}

impl Served {
    fn new(checkpoints: Checkpoints) -> Self {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        let pods = Arc::new(TestPods::default());
        let (held, dir) = checkpoints.restore();
        let api = PodResourcesApi::new(Arc::clone(&pods) as Arc<dyn PodSource>, held, clock.clone());
        Self { api, pods, clock, _dir: dir }
    }

    async fn list(&self) -> Result<Vec<String>, Status> {
        let listed =
            PodResourcesLister::list(&self.api, Request::new(v1::ListPodResourcesRequest {})).await?;
        Ok(listed.into_inner().pod_resources.into_iter().map(|pod| pod.name).collect())
    }

    async fn list_alpha(&self) -> Result<Vec<String>, Status> {
        let listed = AlphaLister::list(&self.api, Request::new(v1alpha1::ListPodResourcesRequest {})).await?;
        Ok(listed.into_inner().pod_resources.into_iter().map(|pod| pod.name).collect())
    }

    async fn get(&self, name: &str) -> Result<v1::PodResources, Status> {
        let (pod_name, pod_namespace) = (name.to_owned(), "ns".to_owned());
        let request = Request::new(v1::GetPodResourcesRequest { pod_name, pod_namespace });
        Ok(self.api.get(request).await?.into_inner().pod_resources.unwrap())
    }

    /// Serves on the socket of a root directory.
    fn serve(&self) -> (PathBuf, TempDir, tokio_util::sync::DropGuard) {
        let root = tempfile::tempdir().unwrap();
        let listener = crate::listen(root.path()).unwrap();
        let stop = CancellationToken::new();
        let serving = self.api.clone().serve(listener, stop.clone());
        drop(task::spawn("serve", async move { serving.await.unwrap() }));
        (crate::socket(root.path()), root, stop.drop_guard())
    }
}

fn pod(uid: &str, name: &str) -> PodView {
    view(uid, name, json!({"containers": [{"name": "main"}]}))
}

fn error<T>(result: Result<T, Status>) -> (Code, String) {
    let status = result.map(|_| ()).unwrap_err();
    (status.code(), status.message().to_owned())
}

fn metric(line: &str) -> u64 {
    let text = quintlet_telemetry::metrics::text();
    let found = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
    found.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn pods_that_have_not_ended_are_listed_and_the_first_version_lists_all() {
    let served = Served::new(Checkpoints::new());
    // Name, phase, whether the pod has terminated, and whether its termination was requested.
    let pods = [
        ("pending", "Pending", false, false, true),
        ("running", "Running", false, false, true),
        ("stopping", "Running", false, true, true),
        ("evicted", "Failed", false, true, true),
        ("succeeded", "Succeeded", false, false, false),
        ("rejected", "Failed", false, false, false),
        ("terminated", "Running", true, true, false),
    ];
    for (name, phase, has_terminated, is_ending, _) in pods {
        served.pods.add(with_phase(pod(name, name), phase));
        if has_terminated {
            served.pods.terminated.lock().insert(name.to_owned());
        }
        if is_ending {
            served.pods.ending.lock().insert(name.to_owned());
        }
    }
    let active: Vec<&str> = pods.iter().filter(|pod| pod.4).map(|pod| pod.0).collect();
    assert_eq!(served.list().await.unwrap(), active);
    assert_eq!(served.list_alpha().await.unwrap(), pods.map(|pod| pod.0));
    for (name, .., is_active) in pods {
        served.clock.advance(Duration::from_secs(1));
        match is_active {
            true => assert_eq!(served.get(name).await.unwrap().name, name),
            false => {
                let text = format!("pod {name} in namespace ns not found");
                assert_eq!(error(served.get(name).await), (Code::Unknown, text));
            }
        }
    }
}

#[tokio::test]
async fn of_two_pods_with_one_name_the_latest_is_returned() {
    let mut checkpoints = Checkpoints::new();
    checkpoints.allocate("new", "main", GPU, &[(-1, "g1")]);
    let served = Served::new(checkpoints);
    served.pods.add(PodView { created_unix_ns: 2, ..pod("new", "web") });
    served.pods.add(PodView { created_unix_ns: 3, is_removed: true, ..pod("old", "web") });
    assert_eq!(served.get("web").await.unwrap().containers[0].devices.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn all_methods_share_a_rate_and_calls_beyond_it_are_not_counted() {
    let served = Served::new(Checkpoints::new());
    let all = "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1\"}";
    let before = metric(all);
    let rejected = (Code::ResourceExhausted, "rejected by rate limit".to_owned());
    assert!(served.list().await.unwrap().is_empty());
    served.api.get_allocatable_resources(Request::new(v1::AllocatableResourcesRequest {})).await.unwrap();
    served.list_alpha().await.unwrap();
    for _ in 3..BURST {
        assert_eq!(error(served.get("a").await).0, Code::Unknown);
    }
    let began = tokio::time::Instant::now();
    assert_eq!(error(served.list().await), rejected);
    assert_eq!(began.elapsed(), REJECTION);
    assert_eq!(error(served.list_alpha().await), rejected);
    assert_eq!(error(served.get("a").await), rejected);
    // One call of 100 per second is due.
    served.clock.advance(Duration::from_millis(10));
    served.list().await.unwrap();
    assert_eq!(error(served.list().await), rejected);
    assert_eq!(metric(all) - before, 10);
    let label =
        |name: &str| metric(&format!("kubelet_pod_resources_endpoint_{name}{{server_api_version=\"v1\"}}"));
    assert!(label("requests_list") >= 2 && label("requests_get") >= 7 && label("errors_get") >= 7);
    assert!(label("requests_get_allocatable") >= 1);
    assert_eq!((label("errors_list"), label("errors_get_allocatable")), (0, 0));
    let alpha = "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1alpha1\"}";
    assert!(metric(alpha) >= 1);
}

/// Returns checkpoints with a container whose entry has this number of megabytes.
fn large(pod: &str, megabytes: usize) -> Checkpoints {
    let mut checkpoints = Checkpoints::new();
    let ids: Vec<String> =
        (0..megabytes << 4).map(|number| format!("{number}-{}", "x".repeat(1 << 16))).collect();
    let devices: Vec<_> = ids.iter().map(|id| (-1, id.as_str())).collect();
    checkpoints.allocate(pod, "main", GPU, &devices);
    checkpoints.allocate("small", "main", GPU, &[(-1, "g1")]);
    checkpoints
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_an_error_and_other_pods_are_returned() {
    let served = Served::new(large("large", 17));
    served.pods.add(pod("large", "large"));
    served.pods.add(pod("small", "small"));
    let too_large = (Code::ResourceExhausted, "the answer has more than 16777216 bytes".to_owned());
    assert_eq!(error(served.list().await), too_large);
    assert_eq!(error(served.get("large").await), too_large);
    assert_eq!(served.get("small").await.unwrap().containers[0].devices.len(), 1);
    assert!(metric("kubelet_pod_resources_endpoint_errors_list{server_api_version=\"v1\"}") >= 1);
}

#[tokio::test]
async fn the_socket_has_both_versions_and_replaces_that_of_a_process_that_ended() {
    let served = Served::new(Checkpoints::new());
    served.pods.add(pod("u1", "web"));
    let (path, root, stop) = served.serve();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let channel = socket::channel(path.clone());
    let listed = PodResourcesListerClient::new(channel.clone()).list(v1::ListPodResourcesRequest {}).await;
    assert_eq!(listed.unwrap().into_inner().pod_resources[0].name, "web");
    let listed = AlphaClient::new(channel).list(v1alpha1::ListPodResourcesRequest {}).await;
    assert_eq!(listed.unwrap().into_inner().pod_resources[0].name, "web");
    drop(stop);
    assert!(path.exists());
    let listener = crate::listen(root.path()).unwrap();
    let _serving = task::spawn("serve", served.api.clone().serve(listener, CancellationToken::new()));
    let listed =
        PodResourcesListerClient::new(socket::channel(path)).list(v1::ListPodResourcesRequest {}).await;
    assert_eq!(listed.unwrap().into_inner().pod_resources.len(), 1);
}

/// A connection whose client stops reading.
struct Stalling {
    stream: UnixStream,
    is_stalled: Arc<AtomicBool>,
}

impl AsyncRead for Stalling {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.is_stalled.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

async fn stalling(path: PathBuf, is_stalled: Arc<AtomicBool>) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let (path, is_stalled) = (path.clone(), Arc::clone(&is_stalled));
        async move { UnixStream::connect(path).await.map(|stream| TokioIo::new(Stalling { stream, is_stalled })) }
    });
    Endpoint::from_static("http://local").connect_with_connector(connector).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_do_not_read_or_send_too_much_delay_no_other() {
    let served = Served::new(large("large", 4));
    served.pods.add(pod("large", "large"));
    served.pods.add(pod("small", "small"));
    let (path, _root, _stop) = served.serve();
    let mut calls = Vec::new();
    let mut slow = Vec::new();
    for _ in 0..4 {
        let is_stalled = Arc::new(AtomicBool::new(false));
        let channel = stalling(path.clone(), Arc::clone(&is_stalled)).await;
        slow.push((channel, is_stalled));
    }
    for (channel, is_stalled) in &slow {
        is_stalled.store(true, Ordering::Release);
        for _ in 0..12 {
            let mut client = PodResourcesListerClient::new(channel.clone());
            calls.push(task::spawn("call", async move { client.list(v1::ListPodResourcesRequest {}).await }));
        }
    }
    let mut client = PodResourcesListerClient::new(socket::channel(path));
    for _ in 0..3 {
        let name = |pod_name: String| v1::GetPodResourcesRequest { pod_name, pod_namespace: "ns".to_owned() };
        let found = loop {
            // The calls of the other clients may take the whole burst.
            served.clock.advance(Duration::from_secs(1));
            match client.get(name("small".to_owned())).await {
                Ok(found) => break found.into_inner().pod_resources.unwrap(),
                Err(status) => assert_eq!(status.message(), "rejected by rate limit"),
            }
        };
        assert_eq!(found.name, "small");
        let refused = client.get(name("n".repeat(1 << 20))).await.unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    }
    assert!(calls.iter().all(|call| !call.is_finished()));
    calls.iter().for_each(tokio::task::JoinHandle::abort);
}
