//! Each request for a container is audited, whatever its outcome. A binary of its own, since it sets the
//! process's subscriber of log events.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub, dead_code)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use http::Method;
use node_api_access::limits::Limits;
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use common::Api;

#[derive(Default, Clone)]
struct Lines(Arc<Mutex<Vec<BTreeMap<&'static str, String>>>>);

struct Fields<'a>(&'a mut BTreeMap<&'static str, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "audit" {
            let mut line = BTreeMap::new();
            event.record(&mut Fields(&mut line));
            self.0.lock().push(line);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_for_a_container_is_audited_with_user_pod_and_verdict() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines.clone())).unwrap();
    let (api, _runtime) = Api::with_runtime(Limits::default(), &[]).await;
    api.test_api.set_token("right", "alice", &["ops"]);
    for right in ["proxy", "checkpoint"] {
        api.test_api.allow("alice", "*", &format!("nodes/{right}"));
    }
    api.test_api.set_token("wrong", "mallory", &[]);
    let right = Some("right");
    let acts = [
        ("exec", "/exec/default/web/main?output=1&command=true", "/exec/default/none/main?output=1", "main"),
        ("attach", "/attach/default/web/u1/main?output=1", "/attach/default/none/main?output=1", "main"),
        ("portforward", "/portForward/default/web", "/portForward/default/none", ""),
        ("run", "/run/default/web/main?cmd=true", "/run/default/none/main?cmd=true", "main"),
        ("checkpoint", "/checkpoint/default/web/main", "/checkpoint/default/none/main", "main"),
    ];
    for (action, there, missing, container) in acts {
        let is_plain = matches!(action, "run" | "checkpoint");
        let tries = [
            (None, there, "", "401", "refused", "web"),
            (Some("bad"), there, "", "401", "refused", "web"),
            (Some("wrong"), there, "mallory", "403", "refused", "web"),
            (right, missing, "alice", "404", "failed", "none"),
            (right, there, "alice", if is_plain { "200" } else { "101" }, "allowed", "web"),
        ];
        for (token, path, user, code, verdict, pod) in tries {
            let got = if is_plain {
                api.request(Method::POST, path, token, None).await.0.as_u16().to_string()
            } else {
                let header = token.map(|t| format!("authorization: Bearer {t}\r\n")).unwrap_or_default();
                let (head, _) = api.upgrade(path, &header).await;
                head.split(' ').nth(1).unwrap().to_owned()
            };
            assert_eq!(got, code, "{action} {path} {token:?}");
            let mut line = lines.0.lock().pop().unwrap_or_else(|| panic!("no line for {action} {code}"));
            let client = line.remove("from").unwrap_or_default();
            assert!(client.starts_with("127.0.0.1:"), "{client}");
            let groups = if user == "alice" { "ops,system:authenticated" } else { "" };
            let groups = if user == "mallory" { "system:authenticated" } else { groups };
            let want = [
                ("message", "audit"),
                ("user", user),
                ("groups", groups),
                ("action", action),
                ("namespace", "default"),
                ("pod", pod),
                ("container", container),
                ("code", code),
                ("verdict", verdict),
            ];
            assert_eq!(line, want.map(|(name, value)| (name, value.to_owned())).into());
            assert_eq!(lines.0.lock().len(), 0, "one line for each");
        }
    }
    assert_eq!(api.get("/pods", right).await.0.as_u16(), 200);
    assert_eq!(api.get("/pods", None).await.0.as_u16(), 401);
    assert_eq!(lines.0.lock().len(), 0, "reading is no act on a container");
}
