//! The contract of the fake runtime.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use containerd_client::events::TaskExit;
use containerd_client::services::v1::SubscribeRequest;
use containerd_client::services::v1::events_client::EventsClient;
use prost::Message;
use quintlet_cri_api::v1;
use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_testkit::fake_runtime::{
    Behaviour, ContainerSeed, FakeRuntime, Method, Options, Rule, StopReply,
};
use tonic::Code;
use tonic::transport::Channel;

async fn connect(path: &Path) -> Channel {
    containerd_client::connect(path).await.expect("the socket is there")
}

fn fake(options: Options) -> (tempfile::TempDir, FakeRuntime) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = FakeRuntime::start(&dir.path().join("run/fake.sock"), options).unwrap();
    (dir, runtime)
}

fn sandbox_request(uid: &str, attempt: u32) -> v1::RunPodSandboxRequest {
    v1::RunPodSandboxRequest {
        config: Some(v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: "web".to_owned(),
                uid: uid.to_owned(),
                namespace: "default".to_owned(),
                attempt,
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_created_run_and_removed_by_calls() {
    let (_dir, runtime) = fake(Options::default());
    let channel = connect(runtime.path()).await;
    let mut cri = RuntimeServiceClient::new(channel.clone());
    let mut images = ImageServiceClient::new(channel);
    assert_eq!(
        cri.version(v1::VersionRequest::default()).await.unwrap().get_ref().runtime_name,
        "containerd"
    );
    let spec = Some(v1::ImageSpec { image: "busybox".to_owned(), ..Default::default() });
    images.pull_image(v1::PullImageRequest { image: spec.clone(), ..Default::default() }).await.unwrap();
    let present =
        images.image_status(v1::ImageStatusRequest { image: spec.clone(), verbose: false }).await.unwrap();
    assert_eq!(present.get_ref().image.as_ref().unwrap().repo_tags, ["docker.io/library/busybox:latest"]);
    let sandbox = cri.run_pod_sandbox(sandbox_request("u1", 0)).await.unwrap().into_inner().pod_sandbox_id;
    let request = v1::CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
            image: spec,
            ..Default::default()
        }),
        sandbox_config: None,
    };
    let id = cri.create_container(request.clone()).await.unwrap().into_inner().container_id;
    let again = cri.create_container(request).await.unwrap_err();
    assert!(again.message().contains(&format!("is reserved for {id:?}")), "{again}");
    cri.start_container(v1::StartContainerRequest { container_id: id.clone() }).await.unwrap();
    let exec = v1::ExecSyncRequest { container_id: id.clone(), cmd: vec!["true".to_owned()], timeout: 1 };
    assert_eq!(cri.exec_sync(exec).await.unwrap().get_ref().exit_code, 0);
    cri.stop_container(v1::StopContainerRequest { container_id: id.clone(), timeout: 30 }).await.unwrap();
    let status =
        cri.container_status(v1::ContainerStatusRequest { container_id: id.clone(), verbose: false });
    let status = status.await.unwrap().into_inner().status.unwrap();
    assert_eq!((status.state(), status.exit_code), (v1::ContainerState::ContainerExited, 143));
    cri.stop_pod_sandbox(v1::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await.unwrap();
    assert!(!runtime.sandboxes()[0].ready());
    cri.remove_pod_sandbox(v1::RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    assert!(runtime.sandboxes().is_empty() && runtime.containers().is_empty());
    let kept = runtime.calls_of(Method::StopContainer);
    assert_eq!(kept[0].request::<v1::StopContainerRequest>().timeout, 30);
    assert_eq!(runtime.count(Method::CreateContainer), 2);
}

#[tokio::test(start_paused = true)]
async fn the_exit_event_comes_before_the_state_changes() {
    let (_dir, runtime) = fake(Options { exit_lag: Duration::from_millis(80), ..Options::default() });
    let channel = connect(runtime.path()).await;
    let mut events = EventsClient::new(channel);
    let filters = vec!["namespace==k8s.io,topic==/tasks/exit".to_owned()];
    let mut stream = events.subscribe(SubscribeRequest { filters }).await.unwrap().into_inner();
    let sandbox = runtime.add_sandbox("u1", "web", "default", 0);
    let id = runtime.add_container(&sandbox, &ContainerSeed::running("main"));
    let before = tokio::time::Instant::now();
    assert!(runtime.exit(&id, 3));
    assert!(!runtime.exit(&id, 4), "it ends once");
    let event = stream.message().await.unwrap().unwrap();
    assert_eq!(event.topic, "/tasks/exit");
    let exit = TaskExit::decode(event.event.as_ref().unwrap().value.as_slice()).unwrap();
    assert_eq!(
        (exit.container_id.as_str(), exit.id.as_str(), exit.exit_status),
        (id.as_str(), id.as_str(), 3)
    );
    assert_eq!(event.event.unwrap().type_url, "containerd.events.TaskExit");
    assert!(runtime.container(&id).unwrap().running());
    runtime.wait(|r| !r.container(&id).unwrap().running()).await;
    assert!(before.elapsed() >= Duration::from_millis(80));
    runtime.cut_event_streams();
    assert_eq!(stream.message().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn a_script_delays_fails_and_hangs_only_the_calls_that_it_names() {
    let (_dir, runtime) = fake(Options::default());
    let mut cri = RuntimeServiceClient::new(connect(runtime.path()).await);
    runtime.latency(Method::Version, Duration::from_secs(3));
    let before = tokio::time::Instant::now();
    cri.version(v1::VersionRequest::default()).await.unwrap();
    assert!(before.elapsed() >= Duration::from_secs(3));
    runtime.fail(Method::RunPodSandbox, Code::Unknown, "no address left", 1);
    assert_eq!(cri.run_pod_sandbox(sandbox_request("u1", 0)).await.unwrap_err().message(), "no address left");
    runtime.script(Rule::on(Method::RunPodSandbox).fail_after(Code::Unavailable, "lost").times(1));
    assert_eq!(cri.run_pod_sandbox(sandbox_request("u1", 0)).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(runtime.sandboxes().len(), 1, "the answer was lost, not the work");
    let rule = runtime.script(Rule::on(Method::RunPodSandbox).about("u2").hang());
    let mut other = cri.clone();
    let hanging = tokio::spawn(async move { other.run_pod_sandbox(sandbox_request("u2", 0)).await });
    runtime.wait_count(Method::RunPodSandbox, 3).await;
    let reserved =
        tokio::time::timeout(Duration::from_secs(1), cri.run_pod_sandbox(sandbox_request("u2", 0)));
    assert!(reserved.await.unwrap().unwrap_err().message().contains("is reserved"));
    cri.run_pod_sandbox(sandbox_request("u3", 0)).await.unwrap();
    runtime.unscript(rule);
    hanging.await.unwrap().unwrap();
    assert_eq!(runtime.sandboxes().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_creation_releases_its_name_and_a_cancelled_stop_kills_nothing() {
    let (_dir, runtime) = fake(Options::default());
    let mut cri = RuntimeServiceClient::new(connect(runtime.path()).await);
    runtime.behave("stubborn", Behaviour { exit: None, stop: StopReply::Ignores });
    let sandbox = runtime.add_sandbox("u1", "web", "default", 0);
    let id = runtime.add_container(&sandbox, &ContainerSeed::running("stubborn"));
    let stop = v1::StopContainerRequest { container_id: id.clone(), timeout: 30 };
    let cut = tokio::time::timeout(Duration::from_secs(5), cri.stop_container(stop.clone())).await;
    assert!(cut.is_err());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(runtime.container(&id).unwrap().running());
    cri.stop_container(stop).await.unwrap();
    assert_eq!(runtime.container(&id).unwrap().status.exit_code, 137);
}

#[tokio::test(start_paused = true)]
async fn a_restart_breaks_connections_and_keeps_state() {
    let (_dir, runtime) = fake(Options::default());
    runtime.add_sandbox("u1", "web", "default", 0);
    let mut cri = RuntimeServiceClient::new(connect(runtime.path()).await);
    cri.version(v1::VersionRequest::default()).await.unwrap();
    runtime.hang(Method::Status);
    let mut other = cri.clone();
    let hanging = tokio::spawn(async move { other.status(v1::StatusRequest::default()).await });
    runtime.wait_count(Method::Status, 1).await;
    runtime.down();
    assert!(hanging.await.unwrap().is_err());
    assert!(tokio::net::UnixStream::connect(runtime.path()).await.is_err());
    runtime.up().unwrap();
    let mut cri = RuntimeServiceClient::new(connect(runtime.path()).await);
    assert_eq!(
        cri.list_pod_sandbox(v1::ListPodSandboxRequest::default()).await.unwrap().get_ref().items.len(),
        1
    );
}

#[tokio::test]
async fn five_thousand_containers_are_cheap() {
    let (_dir, runtime) = fake(Options::silent());
    for pod in 0..1000 {
        let sandbox = runtime.add_sandbox(&format!("u{pod}"), &format!("p{pod}"), "default", 0);
        for c in 0..5 {
            runtime.add_container(&sandbox, &ContainerSeed::running(&format!("c{c}")));
        }
    }
    let mut cri =
        RuntimeServiceClient::new(connect(runtime.path()).await).max_decoding_message_size(16 << 20);
    let all = cri.list_containers(v1::ListContainersRequest::default()).await.unwrap();
    assert_eq!(all.get_ref().containers.len(), 5000);
}
