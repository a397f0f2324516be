use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use super::*;

struct Scene {
    dir: tempfile::TempDir,
    clock: Clock,
}

impl Scene {
    fn new() -> Self {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        Self { dir: tempfile::tempdir().unwrap(), clock }
    }

    // A plugin that counts its runs and returns its request as the user name.
    fn plugin(&self, name: &str, body: &str) {
        let path = self.dir.path().join(name);
        let dir = self.dir.path().display();
        let script = format!("#!/bin/sh\nread -r request\necho \"$request\" >> {dir}/{name}.asked\n{body}\n");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn load(&self, providers: &Value) -> Result<Plugins, ConfigError> {
        let config = self.dir.path().join("config.yaml");
        let file = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
            "providers": providers});
        std::fs::write(&config, file.to_string()).unwrap();
        Plugins::load(&config, self.dir.path(), self.clock.clone())
    }

    fn requests(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.path().join(format!("{name}.asked"))).unwrap_or_default();
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }
}

fn provider(name: &str) -> Value {
    json!({"name": name, "matchImages": ["*.test", "*.test:5000/team"], "defaultCacheDuration": "1h",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1"})
}

fn answer(key_type: &str, duration: &str) -> String {
    format!(
        r#"cat <<END
{{"apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
 "cacheKeyType": "{key_type}", {duration} "auth": {{"*.test": {{"username": "$WHO", "password": "$1"}},
 "other.example": {{"username": "no", "password": "no"}}}}}}
END"#
    )
}

async fn lookup(plugins: &Plugins, image: &str) -> Vec<(String, String)> {
    let found = plugins.lookup(image, &image_name::repository(image), &PluginAccounts::new()).await;
    found.into_iter().map(|(c, _)| (c.username, c.password)).collect()
}

#[tokio::test]
async fn a_plugin_is_run_for_matching_images_and_its_response_is_cached() {
    for (key_type, duration, requests) in [
        ("Image", "", 3),
        ("Registry", "", 2),
        ("Global", "", 1),
        ("Registry", r#""cacheDuration": "0s","#, 4),
    ] {
        let scene = Scene::new();
        scene.plugin("p", &answer(key_type, duration));
        let mut config = provider("p");
        config["args"] = json!(["secret"]);
        config["env"] = json!([{"name": "WHO", "value": "me"}]);
        let plugins = scene.load(&json!([config])).unwrap();
        for image in ["a.test/x:1", "a.test/y:1", "b.test/x:1", "b.test/x:1"] {
            let want = [("me".to_owned(), "secret".to_owned())];
            assert_eq!(lookup(&plugins, image).await, want, "{key_type} {image}");
        }
        assert_eq!(scene.requests("p").len(), requests, "{key_type} {duration}");
        assert_eq!(
            scene.requests("p")[0],
            json!({"apiVersion": "credentialprovider.kubelet.k8s.io/v1",
                "kind": "CredentialProviderRequest", "image": "a.test/x:1"})
        );
        assert!(lookup(&plugins, "a.test:5000/other/x:1").await.is_empty());
        assert_eq!(scene.requests("p").len(), requests, "an image it does not match is not asked for");
    }
}

#[tokio::test]
async fn a_plugin_run_is_shared_by_images_of_one_registry_and_delays_no_other_registry() {
    let scene = Scene::new();
    let go = scene.dir.path().join("go");
    let slow =
        format!("case $request in *slow.test*) while [ ! -e {} ]; do sleep 0.05; done;; esac", go.display());
    scene.plugin("p", &format!("{slow}\n{}", answer("Registry", "")));
    let plugins = Arc::new(scene.load(&json!([provider("p")])).unwrap());
    let one = |image: &'static str| {
        let plugins = Arc::clone(&plugins);
        task::spawn("lookup", async move { lookup(&plugins, image).await.len() })
    };
    let slow = [one("slow.test/a"), one("slow.test/b"), one("slow.test/a")];
    let quick = tokio::time::timeout(Duration::from_secs(20), one("quick.test/a")).await;
    assert_eq!(quick.expect("another registry is answered meanwhile").unwrap(), 1);
    assert!(slow.iter().all(|lookup| !lookup.is_finished()));
    std::fs::write(go, "").unwrap();
    for lookup in slow {
        assert_eq!(lookup.await.unwrap(), 1);
    }
    assert_eq!(scene.requests("p").len(), 2, "one run each");
    assert!(plugins.plugins[0].state.lock().in_flight.is_empty());
}

#[tokio::test]
async fn images_that_share_a_run_start_another_if_its_response_is_for_one_image_only() {
    let scene = Scene::new();
    scene.plugin("p", &format!("sleep 0.2\n{}", answer("Image", "")));
    let plugins = scene.load(&json!([provider("p")])).unwrap();
    let (a, again, b) = tokio::join!(
        lookup(&plugins, "a.test/x"),
        lookup(&plugins, "a.test/x"),
        lookup(&plugins, "a.test/y")
    );
    assert_eq!((a.len(), again.len(), b.len()), (1, 1, 1));
    assert_eq!(scene.requests("p").len(), 2);
}

#[tokio::test]
async fn an_endless_response_and_endless_stderr_are_bounded() {
    let scene = Scene::new();
    scene.plugin("p", "cat /dev/zero");
    let plugins = scene.load(&json!([provider("p")])).unwrap();
    let error = plugins.plugins[0].program.run("a.test/x", None).await.err().unwrap();
    assert_eq!(error, "response is longer than 1048576 bytes");
    scene.plugin("p", "head -c 10000000 /dev/zero | tr '\\0' e >&2; exit 3");
    let error = plugins.plugins[0].program.run("a.test/x", None).await.err().unwrap();
    assert_eq!(error, format!("exit status: 3: {}", "e".repeat(256)));
}

#[tokio::test]
async fn a_cached_response_expires() {
    let scene = Scene::new();
    scene.plugin("p", &answer("Global", r#""cacheDuration": "10m","#));
    let plugins = scene.load(&json!([provider("p")])).unwrap();
    lookup(&plugins, "a.test/x").await;
    scene.clock.advance(Duration::from_secs(599));
    lookup(&plugins, "a.test/x").await;
    assert_eq!(scene.requests("p").len(), 1);
    scene.clock.advance(Duration::from_secs(1));
    lookup(&plugins, "a.test/x").await;
    assert_eq!(scene.requests("p").len(), 2);
}

#[tokio::test]
async fn a_failing_plugin_returns_no_credentials_and_does_not_affect_others() {
    let scene = Scene::new();
    scene.plugin("exits", "exit 3");
    scene.plugin("garbage", "echo hunter2");
    scene.plugin("wrong", r#"echo '{"apiVersion": "x/v1", "kind": "Other", "cacheKeyType": "Image"}'"#);
    scene.plugin("works", &answer("Image", ""));
    let all: Vec<Value> = ["exits", "garbage", "wrong", "works"].into_iter().map(provider).collect();
    let plugins = scene.load(&json!(all)).unwrap();
    assert_eq!(lookup(&plugins, "a.test/x").await.len(), 1);
    let why = plugins.plugins[1].program.run("a.test/x", None).await.err().unwrap();
    assert!(!why.contains("hunter2"), "{why}");
}

#[tokio::test]
async fn a_token_is_sent_only_to_plugins_that_require_it() {
    let scene = Scene::new();
    scene.plugin("plain", &answer("Global", ""));
    scene.plugin("wants", &answer("Global", ""));
    let mut wants = provider("wants");
    wants["tokenAttributes"] = json!({"serviceAccountTokenAudience": "registry", "cacheType": "ServiceAccount",
        "requireServiceAccount": true});
    let plugins = scene.load(&json!([provider("plain"), wants])).unwrap();
    let wanted: Vec<_> = plugins
        .token_attributes("a.test/x")
        .map(|(i, t)| (i, t.service_account_token_audience.as_str()))
        .collect();
    assert_eq!(wanted, [(1, "registry")]);
    assert_eq!(plugins.token_attributes("a.example/x").count(), 0);
    let ask = async |who: Option<&str>| {
        let accounts = who.map(|w| (1, Some(account(w, &[])))).into_iter().collect();
        plugins.lookup("a.test/x", "a.test/x", &accounts).await.len()
    };
    assert_eq!(ask(None).await, 1, "without an account only the other answers");
    assert_eq!((ask(Some("a")).await, ask(Some("b")).await, ask(Some("a")).await), (2, 2, 2));
    let tokens: Vec<Value> =
        scene.requests("wants").iter().map(|r| r["serviceAccountToken"].clone()).collect();
    assert_eq!(tokens, [json!("token of a"), json!("token of b")]);
    assert!(scene.requests("plain").iter().all(|r| r.get("serviceAccountToken").is_none()));
}

fn account(name: &str, annotations: &[(&str, &str)]) -> PluginAccount {
    PluginAccount {
        token: format!("token of {name}"),
        account: ImagePullServiceAccount { name: name.to_owned(), ..ImagePullServiceAccount::default() },
        annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    }
}

#[tokio::test]
async fn each_plugin_gets_its_own_token_and_one_without_required_annotations_is_skipped() {
    let scene = Scene::new();
    let mut all = Vec::new();
    for (name, require) in [("first", true), ("second", true), ("third", false)] {
        scene.plugin(name, &answer("Global", ""));
        let mut p = provider(name);
        p["tokenAttributes"] = json!({"serviceAccountTokenAudience": name, "cacheType": "Token",
            "requireServiceAccount": require});
        all.push(p);
    }
    let plugins = scene.load(&json!(all)).unwrap();
    let accounts = |third: Option<PluginAccount>| {
        [(0, Some(account("for first", &[]))), (1, Some(account("for second", &[]))), (2, third)].into()
    };
    assert_eq!(plugins.lookup("a.test/x", "a.test/x", &accounts(None)).await.len(), 2);
    for name in ["first", "second"] {
        let requests = scene.requests(name);
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0]["serviceAccountToken"], json!(format!("token of for {name}")));
    }
    assert_eq!(scene.requests("third").len(), 0);
    assert_eq!(plugins.lookup("a.test/x", "a.test/x", &PluginAccounts::new()).await.len(), 1);
    assert_eq!(scene.requests("third")[0].get("serviceAccountToken"), None, "it does not need one");
}

#[tokio::test]
async fn requested_annotations_are_sent_and_are_part_of_the_cache_key() {
    let scene = Scene::new();
    scene.plugin("p", &answer("Global", ""));
    let mut config = provider("p");
    config["tokenAttributes"] = json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
        "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["x/must"],
        "optionalServiceAccountAnnotationKeys": ["x/may"]});
    let plugins = scene.load(&json!([config])).unwrap();
    let (_, attributes) = plugins.token_attributes("a.test/x").next().unwrap();
    let select = |all: &[(&str, &str)]| attributes.select(&account("", all).annotations);
    assert_eq!(select(&[("x/may", "1"), ("x/other", "2")]), None, "one that it needs is missing");
    let selected = select(&[("x/must", "1"), ("x/other", "2")]).unwrap();
    assert_eq!(selected, account("", &[("x/must", "1")]).annotations);
    assert_eq!(select(&[("x/must", "1"), ("x/may", "2")]).unwrap().len(), 2);
    for (value, requests) in [("1", 1), ("1", 1), ("2", 2)] {
        let accounts = [(0, Some(account("a", &[("x/must", value)])))].into();
        plugins.lookup("a.test/x", "a.test/x", &accounts).await;
        assert_eq!(scene.requests("p").len(), requests);
    }
    assert_eq!(scene.requests("p")[1]["serviceAccountAnnotations"], json!({"x/must": "2"}));
}

#[test]
fn a_bad_configuration_is_refused_by_field() {
    let scene = Scene::new();
    scene.plugin("p", "");
    let with = |field: &str, value: Value| {
        let mut p = provider("p");
        p[field] = value;
        p
    };
    for (config, want) in [
        (provider("absent"), "does not exist"),
        (with("name", json!("../p")), "providers.name"),
        (with("matchImages", json!([])), "providers.matchImages"),
        (with("apiVersion", json!("x/v1")), "providers.apiVersion"),
        (with("defaultCacheDuration", json!("soon")), "providers.defaultCacheDuration"),
        (with("surprise", json!(1)), "surprise"),
        (
            with(
                "tokenAttributes",
                json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
                "requireServiceAccount": false, "requiredServiceAccountAnnotationKeys": ["a/b"]}),
            ),
            "requiredServiceAccountAnnotationKeys",
        ),
        (
            with(
                "tokenAttributes",
                json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
                "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["a/b"],
                "optionalServiceAccountAnnotationKeys": ["a/b"]}),
            ),
            "is duplicate",
        ),
    ] {
        let error = scene.load(&json!([config])).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}
