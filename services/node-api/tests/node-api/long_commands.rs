//! Commands of `kubectl exec` that make the URL longer than hyper reads.

use node_api_access::limits::Limits;
use quintlet_cri_api::v1;
use quintlet_testkit::fake_runtime::Method;

use crate::common::Api;

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_may_have_almost_a_mebibyte() {
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let words: Vec<String> = (0..9000).map(|n| format!("word-{n} {}", "x".repeat(80))).collect();
    let parameters: String = words.iter().map(|w| format!("&command={}", w.replace(' ', "%20"))).collect();
    assert!(parameters.len() > 900_000, "{}", parameters.len());
    let (head, _) = api.upgrade(&format!("/exec/default/web/main?output=1{parameters}"), "").await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    let call = runtime.calls_of(Method::Exec).remove(0).request::<v1::ExecRequest>();
    assert!(call.cmd == words, "{} words of {}", call.cmd.len(), words.len());
    // The kubelet reads 1 MiB of header.
    let (head, _) =
        api.upgrade(&format!("/exec/default/web/main?output=1{parameters}{parameters}"), "").await;
    assert!(head.starts_with("HTTP/1.1 431"), "{head}");
    let (head, _) = api.upgrade(&format!("/{}", "long/".repeat(20_000)), "").await;
    assert!(head.starts_with("HTTP/1.1 431"), "a path of this length names nothing: {head}");
    assert_eq!(runtime.count(Method::Exec), 1);
}
