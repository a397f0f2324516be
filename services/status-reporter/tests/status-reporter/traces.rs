//! Spans of writes to the API server, in the traces of their callers.

use quintlet_proto::common::v1::Trace;
use quintlet_proto::status::v1 as wire;
use quintlet_telemetry::TelemetryOptions;
use quintlet_testapi::{Failure, TestApi};
use tonic::{Code, Request};

use crate::common::Running;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[tokio::test]
async fn events_and_mirror_pods_are_written_in_the_trace_of_their_caller() {
    quintlet_telemetry::init("status-reporter", &TelemetryOptions::default()).unwrap();
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    let traceparent = format!("00-{TRACE}-{PARENT}-01");
    let event = wire::RecordEventRequest {
        kind: "Pod".into(),
        namespace: "default".into(),
        name: "web".into(),
        uid: "u".into(),
        r#type: "Warning".into(),
        reason: "BackOff".into(),
        trace: Some(Trace { traceparent: traceparent.clone(), tracestate: String::new() }),
        ..Default::default()
    };
    for event in [event.clone(), wire::RecordEventRequest { trace: None, ..event }] {
        service.client.record_event(event).await.unwrap();
    }
    let mirror = |is_traced: bool| {
        let mut request = Request::new(wire::DeleteMirrorRequest {
            namespace: "default".into(),
            name: "web".into(),
            uid: "u".into(),
        });
        if is_traced {
            request.metadata_mut().insert("traceparent", traceparent.parse().unwrap());
        }
        request
    };
    service.client.delete_mirror(mirror(true)).await.unwrap();
    service.client.delete_mirror(mirror(false)).await.unwrap();
    api.faults().fail("delete pods", 1, Failure::Forbidden);
    let refused = service.client.delete_mirror(mirror(true)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);

    let spans = quintlet_telemetry::ring().query("", "").spans;
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let (events, mirrors) = (named("write event"), named("write mirror pod"));
    assert_eq!((events.len(), mirrors.len()), (1, 2), "{spans:#?}");
    for span in events.iter().chain(&mirrors) {
        assert_eq!((span.trace_id.as_str(), span.parent_span_id.as_str()), (TRACE, PARENT), "{span:?}");
        assert_eq!(span.attributes["k8s.pod.name"], "web");
        assert_eq!(span.attributes["k8s.namespace.name"], "default");
    }
    assert_eq!(events[0].attributes["k8s.pod.uid"], "u");
    let errors: Vec<&str> = events.iter().chain(&mirrors).map(|span| span.error.as_str()).collect();
    assert_eq!(errors[..2], ["", ""]);
    assert!(errors[2].starts_with("PermissionDenied: "), "{errors:?}");
    service.stop().await;
}
