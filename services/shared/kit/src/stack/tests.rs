use std::convert::Infallible;

use http::HeaderValue;
use quintlet_telemetry::TelemetryOptions;
use quintlet_telemetry::propagate::{TRACEPARENT, current_trace_id};
use tokio::time::Instant;
use tonic::body::Body as GrpcBody;
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

use super::*;

const METHOD: &str = "/quintlet.kit.v1.Test/Call";

fn request(headers: &[(&'static str, &'static str)]) -> Request<()> {
    let mut request = Request::builder().uri(METHOD).body(()).unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    request
}

fn code(response: &Response<GrpcBody>) -> Option<Code> {
    response.headers().get(Status::GRPC_STATUS).map(|code| Code::from_bytes(code.as_bytes()))
}

#[test]
fn the_time_that_a_caller_waits_is_read_in_all_units() {
    let limit = |text: &'static str| time_limit(request(&[(GRPC_TIMEOUT, text)]).headers());
    for (text, want) in [
        ("2H", Some(Duration::from_secs(7200))),
        ("3M", Some(Duration::from_secs(180))),
        ("4S", Some(Duration::from_secs(4))),
        ("5m", Some(Duration::from_millis(5))),
        ("6u", Some(Duration::from_micros(6))),
        ("00000007n", Some(Duration::from_nanos(7))),
        ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
        ("123456789S", None),
        ("S", None),
        ("", None),
        ("+1S", None),
        ("1s", None),
        ("1", None),
    ] {
        assert_eq!(limit(text), want, "{text:?}");
    }
    assert_eq!(time_limit(&HeaderMap::new()), None);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_has_not_begun_its_response_at_the_deadline_gets_deadline_exceeded() {
    let hangs = service_fn(|_: Request<()>| std::future::pending::<Result<Response<GrpcBody>, Infallible>>());
    let service = ServiceBuilder::new().layer(DeadlineLayer).service(hangs);
    let start = Instant::now();
    let late = service.clone().oneshot(request(&[(GRPC_TIMEOUT, "3S")])).await.unwrap();
    assert_eq!(code(&late), Some(Code::DeadlineExceeded));
    assert_eq!(start.elapsed(), Duration::from_secs(3).checked_sub(BEFORE_TONIC).unwrap());
    let unlimited = tokio::time::timeout(Duration::from_secs(100), service.oneshot(request(&[]))).await;
    assert!(unlimited.is_err(), "a caller without a deadline waits");
}

#[tokio::test]
async fn a_panic_in_a_call_is_its_response() {
    let panics = service_fn(|_: Request<()>| async {
        let pod = contain::current().map(|work| work.uid().to_owned());
        assert_eq!(pod, None, "no pod");
        Ok::<_, Infallible>(String::new())
    });
    let service =
        ServiceBuilder::new().layer(ContainLayer::new(|panic| panic.message.clone())).service(panics);
    let answer = service.oneshot(request(&[(contain::POD_UID_HEADER, "u-1")])).await.unwrap();
    assert!(answer.contains("no pod") && answer.contains("u-1"), "{answer}");
}

#[tokio::test]
async fn a_span_of_a_call_belongs_to_the_trace_of_the_caller_and_is_recorded_once() {
    quintlet_telemetry::init("kit-test", &TelemetryOptions::default()).unwrap();
    let own = || {
        let span = tracing::info_span!("Served", k8s.pod.uid = "u-stack");
        span.in_scope(current_trace_id).unwrap()
    };
    let traces = service_fn(move |_: Request<()>| async move {
        let before = own();
        // The context is there at each poll.
        tokio::task::yield_now().await;
        Ok::<_, Infallible>([before, own()])
    });
    let service = ServiceBuilder::new().layer(ContinueTraceLayer).service(traces);
    let caller = "4bf92f3577b34da6a3ce929d0e0e4736";
    let of_caller = request(&[(TRACEPARENT, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")]);
    // Both are polled by one thread in turns.
    let both = futures::future::join(service.clone().oneshot(of_caller), service.oneshot(request(&[])));
    let (continued, alone) = both.await;
    assert_eq!(continued.unwrap(), [caller, caller]);
    let alone = alone.unwrap();
    assert!(alone.iter().all(|trace| trace != caller), "{alone:?}");
    let spans = quintlet_telemetry::ring().query(caller, "u-stack").spans;
    let parents: Vec<&str> = spans.iter().map(|span| &*span.parent_span_id).collect();
    assert_eq!(parents, ["00f067aa0ba902b7"; 2]);
}

/// Returns the series of the calls of a service, without those of other tests.
fn counts(service: &str) -> Vec<(String, u64)> {
    let text = quintlet_telemetry::metrics::text();
    let label = format!("service=\"{service}\"");
    let lines =
        text.lines().filter(|line| line.starts_with("quintlet_grpc_calls_total{") && line.contains(&label));
    let series = lines.map(|line| {
        let (labels, count) = line.rsplit_once(' ').unwrap();
        let names = labels.split('"').skip(3).step_by(2).collect::<Vec<_>>().join(" ");
        (names, count.parse().unwrap())
    });
    let mut series: Vec<_> = series.collect();
    series.sort();
    series
}

/// Sends frames, then ends. Without frames it has no trailers, as a stream that its client cuts.
fn body(frames: Vec<Frame<bytes::Bytes>>) -> GrpcBody {
    let frames = futures::stream::iter(frames.into_iter().map(Ok::<_, Infallible>));
    GrpcBody::new(http_body_util::StreamBody::new(frames))
}

fn trailers(code: &'static str) -> Frame<bytes::Bytes> {
    Frame::trailers(HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static(code))]))
}

#[tokio::test]
async fn a_call_is_counted_once_with_its_last_status_when_it_has_ended() {
    let serve = |answer: fn() -> Response<GrpcBody>| {
        let service = service_fn(move |_: Request<()>| async move { Ok::<_, Infallible>(answer()) });
        ServiceBuilder::new().layer(CountLayer).service(service)
    };
    let request =
        |method: &str| Request::builder().uri(format!("/quintlet.kit.v1.Counted/{method}")).body(()).unwrap();
    assert_eq!(counts("quintlet.kit.v1.Counted"), []);
    let ok = serve(|| Response::new(body(vec![Frame::data(bytes::Bytes::from_static(b"x")), trailers("0")])));
    for _ in 0..2 {
        let mut answer = ok.clone().oneshot(request("Good")).await.unwrap().into_body();
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut answer).poll_frame(cx)).await {
            frame.unwrap();
        }
        drop(answer);
    }
    let cut = ok.oneshot(request("Cut")).await.unwrap();
    assert_eq!(counts("quintlet.kit.v1.Counted"), [("Good OK".to_owned(), 2)], "an open call is not counted");
    drop(cut);
    let failed = serve(|| Status::not_found("no such thing").into_http());
    drop(failed.oneshot(request("Bad")).await.unwrap());
    let others = counts("other").iter().map(|(_, count)| count).sum::<u64>();
    let unknown = serve(|| Status::unimplemented("no such method").into_http());
    drop(unknown.oneshot(request("Whatever")).await.unwrap());
    let series = [("Bad NotFound", 1), ("Cut Canceled", 1), ("Good OK", 2)];
    assert_eq!(counts("quintlet.kit.v1.Counted"), series.map(|(names, count)| (names.to_owned(), count)));
    assert_eq!(counts("other").iter().map(|(_, count)| count).sum::<u64>(), others + 1);
}

#[tokio::test]
async fn a_caller_names_its_trace_and_its_pod() {
    quintlet_telemetry::init("kit-test", &TelemetryOptions::default()).unwrap();
    let headers =
        service_fn(|request: Request<()>| async move { Ok::<_, Infallible>(request.headers().clone()) });
    let caller = Caller::new(headers);
    assert!(caller.clone().oneshot(request(&[])).await.unwrap().is_empty());
    let work = contain::Work::new("u-1", "ns/p").with_priority(true);
    let span = tracing::info_span!("pass");
    let trace = span.in_scope(current_trace_id).unwrap();
    let call = tracing::Instrument::instrument(caller.clone().oneshot(request(&[])), span);
    let named = contain::contained(work, call).await.unwrap().unwrap();
    assert!(named[TRACEPARENT].to_str().unwrap().contains(&trace), "{named:?}");
    assert_eq!(
        (&named[contain::POD_UID_HEADER], &named[contain::CRITICAL_HEADER]),
        (&"u-1".parse().unwrap(), &"true".parse().unwrap())
    );
    let unknown = contain::contained(contain::Work::new("", "ns/p"), caller.oneshot(request(&[])));
    assert!(unknown.await.unwrap().unwrap().is_empty(), "the UID of the pod is not known");
}
