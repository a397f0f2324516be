//! Effects of the configuration on a proxy.

use std::time::Duration;

use bytes::Bytes;
use cri_proxy::policy::Socket;
use cri_proxy::reply;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;

use crate::common::{Act, Bench, Script, good};

const STATUS: &str = "/runtime.v1.RuntimeService/ContainerStatus";
const IMAGES: &str = "/runtime.v1.ImageService/ListImages";
const LIST: &str = "/runtime.v1.RuntimeService/ListContainers";

fn empty() -> Bytes {
    Bytes::from_static(&[0; 5])
}

#[tokio::test]
async fn a_call_is_cancelled_after_the_configured_timeout() {
    let limit = Duration::from_millis(150);
    let bench = Bench::changed("fake", "1", 64, Clock::system(), |config| config.timeout = limit).await;
    bench.script.on(STATUS, [Act::Hang]);
    let start = tokio::time::Instant::now();
    let request = reply::frame(&v1::ContainerStatusRequest::default());
    let given_up = bench.call(Socket::Sync, STATUS, &[], request);
    let got =
        tokio::time::timeout(Duration::from_secs(20), given_up).await.expect("not the default of 2 min");
    assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
    assert_eq!((got.code(), got.outcome()), ("4", "unknown"));
}

#[tokio::test]
async fn images_may_have_a_separate_socket() {
    let other = tempfile::tempdir().unwrap();
    let socket = other.path().join("images.sock");
    let images = Script::default();
    let answer = v1::ListImagesResponse {
        images: vec![v1::Image { id: "of-the-image-service".into(), ..Default::default() }],
    };
    images.on(IMAGES, [good(&answer)]);
    let serving = images.serve(&socket);
    let bench = Bench::changed("fake", "1", 64, Clock::system(), |c| c.images = Some(socket.clone())).await;
    bench.script.on(LIST, [good(&v1::ListContainersResponse::default())]);
    let got = bench.call(Socket::Sync, IMAGES, &[], empty()).await;
    assert_eq!(got.body, reply::frame(&answer));
    let got = bench.call(Socket::Sync, LIST, &[], empty()).await;
    assert_eq!(got.outcome(), "ok");
    assert_eq!((images.seen(IMAGES).len(), bench.script.seen(IMAGES).len()), (1, 0));
    assert_eq!((images.seen(LIST).len(), bench.script.seen(LIST).len()), (0, 1));
    serving.cancel();
}
