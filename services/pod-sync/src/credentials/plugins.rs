//! Exec credential providers: programs that are asked for the credentials of an image
//! (staging/src/k8s.io/kubelet/pkg/apis/credentialprovider).

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::clock::Clock;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::Mutex;

use super::keyring::{self, Credential, Keyring};
use crate::decide::image_access::AccountUsed;

/// A plugin gets this long (pkg/credentialprovider/plugin).
const LIMIT: Duration = Duration::from_secs(60);
/// Answers kept; a registry each is usual.
const CACHED: usize = 256;
const API_GROUP: &str = "credentialprovider.kubelet.k8s.io";

/// The file of `--image-credential-provider-config`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    providers: Vec<ProviderConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderConfig {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<EnvVar>,
    token_attributes: Option<TokenAttributes>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvVar {
    name: String,
    value: String,
}

/// What a plugin wants of the pod's service account.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenAttributes {
    /// Audience of the token.
    pub service_account_token_audience: String,
    /// `ServiceAccount` or `Token`: what an answer is cached under.
    pub cache_type: String,
    /// The plugin is not asked for pods without a service account.
    pub require_service_account: bool,
}

/// The configuration of plugins cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {problem}", path = path.display())]
pub struct ConfigError {
    path: PathBuf,
    problem: String,
}

/// A pod's service account, for plugins that want it.
#[derive(Clone, Default)]
pub struct Account {
    /// `namespace/name`; what answers of cache type ServiceAccount are kept under.
    pub key: String,
    /// The token.
    pub token: String,
    /// Which account it is.
    pub account: AccountUsed,
}

#[derive(Debug)]
struct Plugin {
    config: ProviderConfig,
    program: PathBuf,
    default_cache: Duration,
    // Held while the program runs: images of one registry ask once, and one program never runs in crowds.
    cache: Mutex<HashMap<String, Answer>>,
}

#[derive(Debug, Clone)]
struct Answer {
    keyring: Arc<Keyring>,
    until: Duration,
}

/// All configured plugins, in the order of the file.
#[derive(Debug)]
pub struct Plugins {
    plugins: Vec<Plugin>,
    clock: Clock,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    api_version: String,
    kind: String,
    cache_key_type: String,
    #[serde(default)]
    cache_duration: Option<String>,
    #[serde(default)]
    auth: BTreeMap<String, ResponseAuth>,
}

#[derive(Deserialize)]
struct ResponseAuth {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

impl Plugins {
    /// Reads the configuration; programs are looked for in `bin_dir`.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown or bad field, or names a program that is not there.
    pub fn load(config: &Path, bin_dir: &Path, clock: Clock) -> Result<Self, ConfigError> {
        let error = |problem: String| ConfigError { path: config.to_owned(), problem };
        let text = std::fs::read_to_string(config).map_err(|e| error(e.to_string()))?;
        let file: ConfigFile = serde_saphyr::from_str(&text).map_err(|e| error(e.to_string()))?;
        if file.kind != "CredentialProviderConfig" || !file.api_version.starts_with("kubelet.config.k8s.io/")
        {
            return Err(error(format!(
                "want CredentialProviderConfig of kubelet.config.k8s.io, not {} of {}",
                file.kind, file.api_version
            )));
        }
        let plugins = file.providers.into_iter().map(|p| Plugin::new(p, bin_dir).map_err(error));
        Ok(Self { plugins: plugins.collect::<Result<_, _>>()?, clock })
    }

    /// The audience that a token of the pod's service account is wanted for, where a plugin for this repository wants one.
    #[must_use]
    pub fn audience(&self, repository: &str) -> Option<&str> {
        let mut matching = self.plugins.iter().filter(|p| p.is_for(repository));
        let wanted = matching.find_map(|p| p.config.token_attributes.as_ref());
        wanted.map(|t| t.service_account_token_audience.as_str())
    }

    /// Credentials of all plugins for a repository, each with whether it was given for the account's token. A plugin that
    /// fails is logged and gives none.
    pub async fn lookup(
        &self,
        image: &str,
        repository: &str,
        account: Option<&Account>,
    ) -> Vec<(Credential, bool)> {
        let mut out = Vec::new();
        for plugin in self.plugins.iter().filter(|p| p.is_for(repository)) {
            let by_account = account.is_some() && plugin.config.token_attributes.is_some();
            match self.ask(plugin, image, repository, account).await {
                Ok(Some(keyring)) => {
                    out.extend(keyring.lookup(repository).into_iter().map(|c| (c, by_account)));
                }
                Ok(None) => {}
                Err(why) => {
                    tracing::warn!(
                        plugin = plugin.config.name,
                        image,
                        why,
                        "credential provider gave no answer"
                    );
                }
            }
        }
        out
    }

    async fn ask(
        &self,
        plugin: &Plugin,
        image: &str,
        repository: &str,
        account: Option<&Account>,
    ) -> Result<Option<Arc<Keyring>>, String> {
        let account = match &plugin.config.token_attributes {
            None => None,
            Some(t) if account.is_none() && t.require_service_account => return Ok(None),
            Some(_) => account,
        };
        let of = |key: &str| {
            let attributes = plugin.config.token_attributes.as_ref();
            let by_token = attributes.is_some_and(|t| t.cache_type == "Token");
            let who = account.map_or("", |a| if by_token { a.token.as_str() } else { a.key.as_str() });
            format!("{who}\0{key}")
        };
        let keys = [
            of(&format!("image {image}")),
            of(&format!("registry {}", keyring::registry(repository))),
            of("global"),
        ];
        let mut cache = plugin.cache.lock().await;
        let now = self.clock.boot();
        cache.retain(|_, a| a.until > now);
        if let Some(known) = keys.iter().find_map(|k| cache.get(k)) {
            return Ok(Some(Arc::clone(&known.keyring)));
        }
        let response = plugin.run(image, account).await?;
        let key = match response.cache_key_type.as_str() {
            "Image" => &keys[0],
            "Registry" => &keys[1],
            "Global" => &keys[2],
            other => return Err(format!("cacheKeyType {other:?} is not Image, Registry or Global")),
        };
        let life = match &response.cache_duration {
            Some(text) => go_duration(text).ok_or("cacheDuration is not a duration")?,
            None => plugin.default_cache,
        };
        let entries = response
            .auth
            .into_iter()
            .map(|(k, a)| (k, Credential { username: a.username, password: a.password }));
        let keyring = Arc::new(Keyring::new(entries.collect()));
        if !life.is_zero() && cache.len() < CACHED {
            cache.insert(key.clone(), Answer { keyring: Arc::clone(&keyring), until: now + life });
        }
        Ok(Some(keyring))
    }
}

impl Plugin {
    fn new(config: ProviderConfig, bin_dir: &Path) -> Result<Self, String> {
        let name = &config.name;
        if name.is_empty() || name.contains(['/', ' ']) || name == "." || name == ".." {
            return Err(format!("providers.name: {name:?} is not the name of a file"));
        }
        let program = bin_dir.join(name);
        if !program.is_file() {
            return Err(format!("providers.name: there is no program {}", program.display()));
        }
        if config.match_images.is_empty() {
            return Err(format!("providers.matchImages of {name}: at least one is wanted"));
        }
        if !config.api_version.starts_with(&format!("{API_GROUP}/v1")) {
            return Err(format!("providers.apiVersion of {name}: {:?} is not supported", config.api_version));
        }
        let default_cache = go_duration(&config.default_cache_duration)
            .ok_or_else(|| format!("providers.defaultCacheDuration of {name} is not a duration"))?;
        if let Some(t) = &config.token_attributes {
            if t.service_account_token_audience.is_empty() {
                return Err(format!(
                    "providers.tokenAttributes.serviceAccountTokenAudience of {name} is empty"
                ));
            }
            if !["ServiceAccount", "Token"].contains(&t.cache_type.as_str()) {
                return Err(format!(
                    "providers.tokenAttributes.cacheType of {name} is not ServiceAccount or Token"
                ));
            }
        }
        Ok(Self { config, program, default_cache, cache: Mutex::default() })
    }

    fn is_for(&self, repository: &str) -> bool {
        self.config.match_images.iter().any(|pattern| keyring::matches(pattern, repository))
    }

    async fn run(&self, image: &str, account: Option<&Account>) -> Result<Response, String> {
        let mut request: Value = json!({
            "apiVersion": self.config.api_version, "kind": "CredentialProviderRequest", "image": image,
        });
        if let Some(account) = account {
            request["serviceAccountToken"] = json!(account.token);
        }
        let mut child = tokio::process::Command::new(&self.program)
            .args(&self.config.args)
            .envs(self.config.env.iter().map(|e| (&e.name, &e.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| e.to_string())?;
        let mut stdin = child.stdin.take().ok_or("no stdin")?;
        let work = async {
            // One that does not read its request may still answer.
            let _ = stdin.write_all(request.to_string().as_bytes()).await;
            drop(stdin);
            child.wait_with_output().await.map_err(|e| e.to_string())
        };
        let output = tokio::time::timeout(LIMIT, work)
            .await
            .map_err(|_| format!("no answer within {}s", LIMIT.as_secs()))??;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr[..output.stderr.len().min(256)]).into_owned();
            return Err(format!("{}: {}", output.status, said.trim()));
        }
        // What it wrote may hold credentials: only the place of a mistake is told.
        let response: Response = serde_json::from_slice(&output.stdout)
            .map_err(|e| format!("its answer is malformed at line {} column {}", e.line(), e.column()))?;
        if response.kind != "CredentialProviderResponse" || response.api_version != self.config.api_version {
            return Err(format!("its answer is {} of {}", response.kind, response.api_version));
        }
        Ok(response)
    }
}

/// A Go duration of whole units, as `12h`, `1h30m`, `0s`.
fn go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    humantime::parse_duration(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    struct Scene {
        dir: tempfile::TempDir,
        clock: Clock,
    }

    impl Scene {
        fn new() -> Self {
            let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(100));
            Self { dir: tempfile::tempdir().unwrap(), clock }
        }

        // A plugin that counts its runs and answers with what it was asked as user name.
        fn plugin(&self, name: &str, body: &str) {
            let path = self.dir.path().join(name);
            let dir = self.dir.path().display();
            let script =
                format!("#!/bin/sh\nread -r request\necho \"$request\" >> {dir}/{name}.asked\n{body}\n");
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

        fn asked(&self, name: &str) -> Vec<Value> {
            let text =
                std::fs::read_to_string(self.dir.path().join(format!("{name}.asked"))).unwrap_or_default();
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
        let found = plugins.lookup(image, &keyring::repository(image), None).await;
        found.into_iter().map(|(c, _)| (c.username, c.password)).collect()
    }

    #[tokio::test]
    async fn a_plugin_is_asked_for_images_it_matches_and_its_answer_is_kept() {
        for (key_type, duration, asked) in [
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
            assert_eq!(scene.asked("p").len(), asked, "{key_type} {duration}");
            assert_eq!(
                scene.asked("p")[0],
                json!({"apiVersion": "credentialprovider.kubelet.k8s.io/v1",
                    "kind": "CredentialProviderRequest", "image": "a.test/x:1"})
            );
            assert!(lookup(&plugins, "a.test:5000/other/x:1").await.is_empty());
            assert_eq!(scene.asked("p").len(), asked, "an image it does not match is not asked for");
        }
    }

    #[tokio::test]
    async fn an_answer_ends_with_its_time() {
        let scene = Scene::new();
        scene.plugin("p", &answer("Global", r#""cacheDuration": "10m","#));
        let plugins = scene.load(&json!([provider("p")])).unwrap();
        lookup(&plugins, "a.test/x").await;
        scene.clock.advance(Duration::from_secs(599));
        lookup(&plugins, "a.test/x").await;
        assert_eq!(scene.asked("p").len(), 1);
        scene.clock.advance(Duration::from_secs(1));
        lookup(&plugins, "a.test/x").await;
        assert_eq!(scene.asked("p").len(), 2);
    }

    #[tokio::test]
    async fn a_plugin_that_fails_gives_nothing_and_costs_the_others_nothing() {
        let scene = Scene::new();
        scene.plugin("exits", "exit 3");
        scene.plugin("garbage", "echo hunter2");
        scene.plugin("wrong", r#"echo '{"apiVersion": "x/v1", "kind": "Other", "cacheKeyType": "Image"}'"#);
        scene.plugin("works", &answer("Image", ""));
        let all: Vec<Value> = ["exits", "garbage", "wrong", "works"].into_iter().map(provider).collect();
        let plugins = scene.load(&json!(all)).unwrap();
        assert_eq!(lookup(&plugins, "a.test/x").await.len(), 1);
        let why = plugins.plugins[1].run("a.test/x", None).await.err().unwrap();
        assert!(!why.contains("hunter2"), "{why}");
    }

    #[tokio::test]
    async fn a_token_is_handed_over_only_where_it_is_wanted() {
        let scene = Scene::new();
        scene.plugin("plain", &answer("Global", ""));
        scene.plugin("wants", &answer("Global", ""));
        let mut wants = provider("wants");
        wants["tokenAttributes"] = json!({"serviceAccountTokenAudience": "registry", "cacheType": "ServiceAccount",
            "requireServiceAccount": true});
        let plugins = scene.load(&json!([provider("plain"), wants])).unwrap();
        assert_eq!(plugins.audience("a.test/x"), Some("registry"));
        assert_eq!(plugins.audience("a.example/x"), None);
        let ask = async |who: Option<&str>| {
            let account = who.map(|w| Account {
                key: w.to_owned(),
                token: format!("token of {w}"),
                account: AccountUsed::default(),
            });
            plugins.lookup("a.test/x", "a.test/x", account.as_ref()).await.len()
        };
        assert_eq!(ask(None).await, 1, "without an account only the other answers");
        assert_eq!((ask(Some("a")).await, ask(Some("b")).await, ask(Some("a")).await), (2, 2, 2));
        let tokens: Vec<Value> =
            scene.asked("wants").iter().map(|r| r["serviceAccountToken"].clone()).collect();
        assert_eq!(tokens, [json!("token of a"), json!("token of b")]);
        assert!(scene.asked("plain").iter().all(|r| r.get("serviceAccountToken").is_none()));
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
            (provider("absent"), "there is no program"),
            (with("name", json!("../p")), "providers.name"),
            (with("matchImages", json!([])), "providers.matchImages"),
            (with("apiVersion", json!("x/v1")), "providers.apiVersion"),
            (with("defaultCacheDuration", json!("soon")), "providers.defaultCacheDuration"),
            (with("surprise", json!(1)), "surprise"),
            (
                with(
                    "tokenAttributes",
                    json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
                    "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["a/b"]}),
                ),
                "requiredServiceAccountAnnotationKeys",
            ),
        ] {
            let error = scene.load(&json!([config])).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
