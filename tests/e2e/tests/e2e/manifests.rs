//! Pods from manifests without an API server: the examples of `make run`, edits and deletions.

use quintlet_e2e::{LONG, Node, Options, page, pods, until};

const EXAMPLES: [(&str, &str); 4] = [
    ("web.yaml", include_str!("../../../../examples/web.yaml")),
    ("crasher.yaml", include_str!("../../../../examples/crasher.yaml")),
    ("once.yaml", include_str!("../../../../examples/once.yaml")),
    ("broken.yaml", include_str!("../../../../examples/broken.yaml")),
];

async fn wait_page(ip: &str, want: &str) {
    until(&format!("{want:?} on the page of {ip}"), LONG, async || match page(ip, 8080, "/").await {
        Ok(body) if body.contains(want) => Ok(()),
        Ok(body) => Err(body),
        Err(e) => Err(e.to_string()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_become_pods_and_pods_are_removed_with_their_files() {
    let node = Node::start(Options::standalone("manifests")).await;
    let recorder = node.record().await;
    for (file, content) in EXAMPLES {
        node.manifest(file, content);
    }

    // Three kinds of probes, an init container, a ConfigMap and a Secret.
    let web = node.wait_ready("web").await;
    assert_eq!(web.view.ready, "1/1");
    assert_eq!(web.container("page").state, "terminated: Completed");
    wait_page(web.ip(), &format!("<p>at {}</p>", web.ip())).await;
    let refused = page(web.ip(), 8080, "/private/").await.unwrap();
    assert!(!refused.contains("for admins"), "the Secret with the server's configuration is not mounted");

    let once = node.wait_pod("once", "Completed", LONG, |p| p.phase() == "Succeeded").await;
    assert_eq!(once.view.status, "Completed");
    let log = node.pod_logs_dir().join(format!("default_{}_{}", once.name(), once.uid())).join("main/0.log");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("500500"), "{log}");

    let problem = until("the problem of broken.yaml", LONG, async || {
        let (_, problems) = node.list().await.map_err(|e| e.to_string())?;
        problems.iter().find(|p| p.origin.ends_with("broken.yaml")).cloned().ok_or(format!("{problems:?}"))
    })
    .await;
    assert_eq!(problem.field, "spec.containers[0].image", "{problem:?}");

    // The delay doubles: 10 s, then 20 s.
    let crasher = node
        .wait_pod("crasher", "a back-off of 20 s", LONG, |p| {
            p.view.waiting.as_ref().is_some_and(|w| w.message.contains("back-off 20s"))
        })
        .await;
    assert_eq!(crasher.waits_for(), "CrashLoopBackOff");
    assert_eq!(crasher.view.status, "CrashLoopBackOff");
    // The recorder has its own stream, which may be later than the list.
    let messages = until("the recorder to see both delays", LONG, async || {
        let messages: Vec<String> = recorder
            .records()
            .into_iter()
            .filter(|r| r.name == crasher.name())
            .filter_map(|r| r.seen?.view.waiting.map(|w| w.message))
            .collect();
        if messages.iter().any(|m| m.contains("back-off 20s")) {
            Ok(messages)
        } else {
            Err(format!("{messages:?}"))
        }
    })
    .await;
    let first = messages.iter().position(|m| m.contains("back-off 10s"));
    let second = messages.iter().position(|m| m.contains("back-off 20s"));
    assert!(first.is_some() && first < second, "{messages:#?}");

    // The web pod is unaffected.
    let settled = node.steady(&["web", "once"]).await;
    let recorder = node.record().await;

    // Another page results in another pod of the same name.
    let edited = EXAMPLES[0].1.replace("<p>at", "<p>edited, at");
    assert_ne!(edited, EXAMPLES[0].1);
    node.manifest("web.yaml", edited);
    let replaced =
        node.wait_pod("web", "replaced and Ready", LONG, |p| p.uid() != web.uid() && p.is_ready()).await;
    wait_page(replaced.ip(), "edited").await;
    node.wait_gone(web.uid()).await;
    let once_only = settled.into_iter().filter(|((_, name), _)| name == once.name()).collect();
    recorder.assert_steady("while another pod was replaced", &once_only);
    node.assert_no_duplicates().await;

    // A manifest that was invalid and is corrected becomes a pod.
    node.pod_manifest(&pods::sleeper("broken"));
    node.wait_ready("broken").await;
    let (_, problems) = node.list().await.unwrap();
    assert!(problems.is_empty(), "{problems:?}");

    for name in ["web", "crasher", "once", "broken"] {
        node.remove_manifest(&format!("{name}.yaml"));
    }
    for uid in [replaced.uid(), crasher.uid(), once.uid()] {
        node.wait_gone(uid).await;
    }
    until("no pods", LONG, async || {
        let (pods, _) = node.list().await.map_err(|e| vec![e.to_string()])?;
        if pods.is_empty() { Ok(()) } else { Err(pods.iter().map(ToString::to_string).collect::<Vec<_>>()) }
    })
    .await;
    node.down().await;
}
