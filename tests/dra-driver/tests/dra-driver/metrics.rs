//! Metrics of claims, under the names of the kubelet.

use quintlet_dra_driver::{Fault, Method};
use tonic::Code;

use crate::agent::{Agent, pod};

const GPU: &str = "gpu.metrics.example.com";
const NIC: &str = "nic.metrics.example.com";

/// Returns the value of the series with this name and these labels.
fn value(name: &str, labels: &[(&str, &str)]) -> Option<u64> {
    let text = quintlet_telemetry::metrics::text();
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
    let is_wanted = |series: &str| {
        let (found, rest) = series.split_once('{').unwrap_or((series, ""));
        let rest: Vec<&str> = rest.trim_end_matches('}').split("\",").collect();
        found == name && rest.len() == labels.len() && labels.iter().all(|label| series.contains(label))
    };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut found = lines.filter_map(|line| line.rsplit_once(' ')).filter(|(series, _)| is_wanted(series));
    found.next().map(|(_, value)| value.parse().unwrap())
}

/// Returns the number of operations on all claims of a pod.
fn operations(name: &str, is_error: &str) -> u64 {
    let labels = [("operation_name", name), ("is_error", is_error)];
    value("dra_operations_duration_seconds_count", &labels).unwrap_or_default()
}

/// Returns the number of calls of a driver that ended with a gRPC code.
fn calls(driver: &str, method: &str, code: &str) -> Option<u64> {
    let method = format!("/k8s.io.kubelet.pkg.apis.dra.{method}");
    let labels = [("driver_name", driver), ("method_name", &method), ("grpc_status_code", code)];
    value("dra_grpc_operations_duration_seconds_count", &labels)
}

/// Returns the number of claims in use of all drivers, and of each one.
fn in_use() -> [Option<u64>; 3] {
    ["<any>", GPU, NIC].map(|driver| value("dra_resource_claims_in_use", &[("driver_name", driver)]))
}

#[tokio::test]
async fn operations_calls_and_claims_in_use_are_counted_under_the_names_of_the_kubelet() {
    let agent = Agent::start();
    let gpu = agent.driver(GPU).await;
    let nic = agent.driver_as(NIC, NIC, &["v1beta1.DRAPlugin"]).await;
    agent.claim("both", &[GPU, NIC], &["p"]);
    agent.claim("one", &[GPU], &["p", "q"]);
    let (p, q) = (pod("p", &["both", "one"]), pod("q", &["one"]));
    assert_eq!(in_use(), [Some(0), None, None]);
    let all = || {
        let names = ["PrepareResources", "UnprepareResources"];
        names.map(|name| [operations(name, "false"), operations(name, "true")])
    };
    let before = all();
    let since = || {
        let mut now = all();
        for (now, before) in now.iter_mut().flatten().zip(before.iter().flatten()) {
            *now -= before;
        }
        now
    };

    agent.prepare(&q).await.unwrap();
    assert_eq!((in_use(), since()), ([Some(1), Some(1), None], [[1, 0], [0, 0]]));
    nic.set_fault(Method::NodePrepareResources, Some(Fault::Fail(Code::ResourceExhausted)));
    agent.prepare(&p).await.unwrap_err();
    // A claim that only one of its drivers has prepared is not in use, as with the kubelet.
    assert_eq!((in_use(), since()), ([Some(1), Some(1), None], [[1, 1], [0, 0]]));
    nic.set_fault(Method::NodePrepareResources, None);
    agent.prepare(&p).await.unwrap();
    assert_eq!((in_use(), since()), ([Some(2), Some(2), Some(1)], [[2, 1], [0, 0]]));
    // A prepared claim needs no call.
    agent.prepare(&p).await.unwrap();
    assert_eq!(since(), [[3, 1], [0, 0]]);
    let prepare = "v1.DRAPlugin/NodePrepareResources";
    assert_eq!(calls(GPU, prepare, "OK"), Some(u64::try_from(gpu.calls_of("NodePrepare")).unwrap()));
    let beta = "v1beta1.DRAPlugin/NodePrepareResources";
    assert_eq!((calls(NIC, beta, "OK"), calls(NIC, beta, "ResourceExhausted")), (Some(1), Some(1)));

    nic.set_fault(Method::NodeUnprepareResources, Some(Fault::Fail(Code::Internal)));
    agent.unprepare(&p).await.unwrap_err();
    assert_eq!(in_use(), [Some(2), Some(2), Some(1)]);
    nic.set_fault(Method::NodeUnprepareResources, None);
    agent.unprepare(&p).await.unwrap();
    assert_eq!((in_use(), since()), ([Some(1), Some(1), None], [[3, 1], [1, 1]]));
    let beta = "v1beta1.DRAPlugin/NodeUnprepareResources";
    assert_eq!((calls(NIC, beta, "OK"), calls(NIC, beta, "Internal")), (Some(1), Some(1)));
    agent.unprepare(&q).await.unwrap();
    assert_eq!((in_use(), since()), ([Some(0), None, None], [[3, 1], [2, 1]]));
    // All calls were short.
    let labels = [("operation_name", "PrepareResources"), ("is_error", "false"), ("le", "0.1")];
    assert!(value("dra_operations_duration_seconds_bucket", &labels) >= Some(3));
}
