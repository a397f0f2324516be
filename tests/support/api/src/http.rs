//! Requests and their responses.

mod continue_token;
mod control;
mod token;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{Method, StatusCode, header};
use serde_json::{Value, json};
use tokio::time::Instant;

use self::continue_token::ContinueToken;
use self::control::control;
use self::token::token;
use crate::discovery::discovery;
use crate::error::ApiError;
use crate::faults::{Failure, Request};
use crate::identity::{Access, Identity};
use crate::nodes;
use crate::patch::{self, PatchKind};
use crate::reply::ok;
use crate::resources::{Resource, Target};
use crate::select::Selector;
use crate::server::Server;
use crate::store::{DeleteOptions, Store};
use crate::watch::{Watch, bookmark, line};

/// Size limit of a body, as in the real server.
const BODY_LIMIT: usize = 3 * 1024 * 1024;

type Query = HashMap<String, String>;

pub(crate) fn router(server: Arc<Server>) -> axum::Router {
    axum::Router::new().fallback(handle).with_state(server)
}

/// Returns a response whose body breaks off at once, so that the client sees a broken connection.
fn broken() -> Response {
    let stream =
        futures::stream::once(async { Err::<Bytes, _>(std::io::Error::other("connection cut on demand")) });
    Response::builder()
        .header(header::CONTENT_LENGTH, 1)
        .body(Body::from_stream(stream))
        .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

async fn handle(State(server): State<Arc<Server>>, request: HttpRequest) -> Response {
    match nodes::target(&server, request.uri().path(), request.uri().query()) {
        Some(Ok(target)) => return nodes::pass_on(target, request).await,
        Some(Err(error)) => return error.into_response(),
        None => {}
    }
    let (parts, body) = request.into_parts();
    let query: Query = axum::extract::Query::try_from_uri(&parts.uri).map(|q| q.0).unwrap_or_default();
    let body = match axum::body::to_bytes(body, BODY_LIMIT).await {
        Ok(body) => body,
        Err(_) => return ApiError::new(413, "RequestEntityTooLarge", "limit is 3145728").into_response(),
    };
    let path = parts.uri.path();
    if let Some(answer) = control(&server, &parts.method, path, &body) {
        return answer;
    }
    if let Some(resource) = crate::reviews::resource(path) {
        let record = Request { resource: resource.to_owned(), ..Request::creation() };
        return match server.faults.before(&record).await {
            None => server.access.answer(&parts.method, path, &body),
            Some(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        };
    }
    let not_found =
        || ApiError::new(404, "NotFound", "the server could not find the requested resource").into_response();
    let Some(target) = Target::parse(path) else {
        return discovery(&server.faults, path).unwrap_or_else(not_found);
    };
    if !server.faults.serves(&target.group, &target.version, target.resource, &target.subresource) {
        return not_found();
    }
    let Some(verb) = verb(&parts.method, &target, &query) else {
        let message = "the server does not allow this method on the requested resource";
        return ApiError::new(405, "MethodNotAllowed", message).into_response();
    };
    let header = |name: header::HeaderName| {
        parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
    };
    let json_body = if body.is_empty() { Ok(Value::Null) } else { crate::reply::parse(&body) };
    let record = Request {
        verb: verb.to_owned(),
        resource: target.resource.to_owned(),
        subresource: target.subresource.clone(),
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        query: parts.uri.query().unwrap_or_default().to_owned(),
        user_agent: header(header::USER_AGENT),
        body: json_body.as_ref().cloned().unwrap_or(Value::Null),
    };
    server.traffic.record(&record);
    let failure = server.faults.before(&record).await;
    if let Some(error) = failure.as_ref().and_then(|failure| as_error(failure, &target)) {
        return error;
    }
    let json_body = match json_body {
        Ok(body) => body,
        Err(error) => {
            return ApiError::bad_request(format!("error decoding request body: {error}")).into_response();
        }
    };
    let identity = Identity::from_authorization(&header(header::AUTHORIZATION));
    let content_type = header(header::CONTENT_TYPE);
    let call = Call { server: &server, identity, verb, target, query, content_type, body: json_body };
    let answer = call.run().unwrap_or_else(IntoResponse::into_response);
    if failure == Some(Failure::LoseReply) { broken() } else { answer }
}

fn as_error(failure: &Failure, target: &Target) -> Option<Response> {
    let resource = Resource::find(&target.group, &target.version, target.resource)?;
    let name = target.name.as_str();
    let error = match failure {
        Failure::TooManyRequests(seconds) => ApiError::too_many_requests(*seconds),
        Failure::Internal => ApiError::new(500, "InternalError", "Internal error occurred: on demand"),
        Failure::Unavailable => {
            ApiError::new(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        }
        Failure::Conflict => ApiError::modified(resource, name),
        Failure::Gone => {
            ApiError::new(410, "Expired", "The resourceVersion for the provided list is too old.")
        }
        Failure::Unauthorized => ApiError::new(401, "Unauthorized", "Unauthorized"),
        Failure::Forbidden => ApiError::forbidden(resource, name, "on demand"),
        Failure::NamespaceTerminating => ApiError::terminating(resource, name),
        Failure::Invalid => {
            let cause = ("FieldValueInvalid", "status".to_owned(), "Invalid value: on demand".to_owned());
            ApiError::invalid(resource, name, &[cause])
        }
        Failure::Declined { code, message } => ApiError::new(*code, "Declined", message),
        Failure::Disconnect => return Some(broken()),
        Failure::LoseReply => return None,
    };
    Some(error.into_response())
}

fn verb(method: &Method, target: &Target, query: &Query) -> Option<&'static str> {
    let flag = |key: &str| query.get(key).is_some_and(|v| v == "true" || v == "1");
    Some(match (method.as_str(), target.name.is_empty()) {
        ("GET", true) if flag("watch") => "watch",
        ("GET", true) => "list",
        ("GET", false) => "get",
        ("POST", _) => "create",
        ("PUT", false) => "update",
        ("PATCH", false) => "patch",
        ("DELETE", false) => "delete",
        ("DELETE", true) => "deletecollection",
        _ => return None,
    })
}

struct Call<'a> {
    server: &'a Arc<Server>,
    identity: Identity,
    verb: &'static str,
    target: Target,
    query: Query,
    content_type: String,
    body: Value,
}

impl Call<'_> {
    fn run(self) -> Result<Response, ApiError> {
        let verb = self.verb;
        let Target { group, version, namespace, name, subresource, .. } = &self.target;
        let missing = || ApiError::new(404, "NotFound", "the server could not find the requested resource");
        let resource = Resource::find(group, version, self.target.resource).ok_or_else(missing)?;
        let store = &self.server.store;
        let known = match subresource.as_str() {
            "" => true,
            "status" => resource.has_status,
            "token" => resource.plural == "serviceaccounts" && verb == "create",
            "binding" | "eviction" => resource.plural == "pods" && verb == "create",
            "ephemeralcontainers" | "resize" => resource.plural == "pods",
            _ => false,
        };
        if !known {
            return Err(missing());
        }
        let selected = |field: &str| selected(&self.query, field);
        let (named, node_selected) = (selected("metadata.name"), selected("spec.nodeName"));
        let access = Access {
            verb,
            resource,
            subresource,
            namespace,
            name: if name.is_empty() { &named } else { name },
            node_selected: &node_selected,
        };
        self.identity.authorize(store, &access)?;
        match verb {
            "get" => {
                let newest = store.get(resource, namespace, name)?;
                let from_cache = self.query.get("resourceVersion").is_some_and(|version| version == "0");
                let cached = self.server.faults.cached(&newest).filter(|_| from_cache);
                Ok(ok(200, cached.as_ref().unwrap_or(&newest)))
            }
            "list" => self.list(resource),
            "watch" => self.watch(resource),
            "create" => {
                self.identity.admit_create(store, &access, &self.body)?;
                self.create(resource)
            }
            "update" => {
                let body = self.body;
                if !resource.unconditional_update
                    && body["metadata"]["resourceVersion"].as_str().unwrap_or_default().is_empty()
                {
                    // NotFound takes precedence over other errors.
                    store.get(resource, namespace, name)?;
                    let cause = "Invalid value: 0: must be specified for an update".to_owned();
                    return Err(ApiError::invalid(
                        resource,
                        name,
                        &[("FieldValueInvalid", "metadata.resourceVersion".to_owned(), cause)],
                    ));
                }
                let updated = store.update(resource, namespace, name, subresource, |object| {
                    self.identity.admit_update(&access, object, &body)?;
                    *object = body;
                    self.server.faults.drop_unknown_fields(resource.plural, object);
                    Ok(())
                })?;
                Ok(ok(200, &updated))
            }
            "patch" => {
                let kind = PatchKind::from_content_type(&self.content_type).ok_or_else(|| {
                    let message = format!(
                        "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json; got {}",
                        self.content_type
                    );
                    ApiError::new(415, "UnsupportedMediaType", message)
                })?;
                let body = self.body;
                let patched = store.update(resource, namespace, name, subresource, |object| {
                    let before = object.clone();
                    patch::apply(kind, resource.plural, object, body).map_err(ApiError::bad_request)?;
                    self.server.faults.drop_unknown_fields(resource.plural, object);
                    let uid = &object["metadata"]["uid"];
                    if *uid != before["metadata"]["uid"] {
                        let cause = format!("Invalid value: {uid}: field is immutable");
                        let cause = ("FieldValueInvalid", "metadata.uid".to_owned(), cause);
                        return Err(ApiError::invalid(resource, name, &[cause]));
                    }
                    self.identity.admit_update(&access, &before, object)
                })?;
                Ok(ok(200, &patched))
            }
            "delete" => {
                self.identity.admit_delete(store, &access)?;
                let options = delete_options(&self.query, &self.body);
                let (object, gone) = store.delete(resource, namespace, name, &options)?;
                if resource.plural == "pods" || !gone {
                    return Ok(ok(200, &object));
                }
                let details = json!({"name": name, "kind": resource.plural, "group": resource.group, "uid": object["metadata"]["uid"]});
                Ok(ok(
                    200,
                    &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}),
                ))
            }
            "deletecollection" => {
                let selector = self.selector(resource)?;
                let page = store.list(resource, namespace, |o| selector.matches(o), None, usize::MAX);
                for item in page.items {
                    let meta = &item["metadata"];
                    let text = |field: &str| meta[field].as_str().unwrap_or_default();
                    let options = delete_options(&self.query, &self.body);
                    // An object deleted concurrently is not an error.
                    let _already_gone = store.delete(resource, text("namespace"), text("name"), &options);
                }
                Ok(ok(
                    200,
                    &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}),
                ))
            }
            _ => Err(missing()),
        }
    }

    fn selector(&self, resource: &Resource) -> Result<Selector, ApiError> {
        let get = |key: &str| self.query.get(key).map(String::as_str).unwrap_or_default();
        Selector::parse(resource, get("fieldSelector"), get("labelSelector"))
    }

    fn create(self, resource: &'static Resource) -> Result<Response, ApiError> {
        let Target { namespace, name, subresource, .. } = &self.target;
        let store = &self.server.store;
        match subresource.as_str() {
            "token" => token(store, namespace, name, self.body),
            "binding" => {
                let node = self.body["target"]["name"].as_str().unwrap_or_default().to_owned();
                store.update(resource, namespace, name, "binding", |pod| {
                    if pod["spec"]["nodeName"].as_str().is_some_and(|n| !n.is_empty()) {
                        let why =
                            format!("pod {name} is already assigned to node {}", pod["spec"]["nodeName"]);
                        return Err(ApiError::conflict(resource, name, &why));
                    }
                    pod["spec"]["nodeName"] = json!(node);
                    Ok(())
                })?;
                Ok(ok(
                    201,
                    &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}),
                ))
            }
            "eviction" => {
                let options = delete_options(&HashMap::new(), &self.body["deleteOptions"]);
                store.delete(resource, namespace, name, &options)?;
                Ok(ok(
                    201,
                    &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}),
                ))
            }
            _ => {
                let created = store.create(resource, namespace, self.body)?;
                if resource.plural == "namespaces" {
                    seed_namespace(store, created["metadata"]["name"].as_str().unwrap_or_default());
                }
                Ok(ok(201, &created))
            }
        }
    }

    fn list(&self, resource: &'static Resource) -> Result<Response, ApiError> {
        let selector = self.selector(resource)?;
        let limit =
            self.query.get("limit").and_then(|l| l.parse().ok()).filter(|l| *l > 0).unwrap_or(usize::MAX);
        let continuation = match self.query.get("continue").filter(|c| !c.is_empty()) {
            None => None,
            Some(token) => Some(
                ContinueToken::decode(token)
                    .ok_or_else(|| ApiError::bad_request("continue key is not valid"))?,
            ),
        };
        let after = continuation.as_ref().map(|token| &token.key);
        let page =
            self.server.store.list(resource, &self.target.namespace, |o| selector.matches(o), after, limit);
        // Later pages have the version of the first one, so that a watch from it misses nothing.
        let rv = continuation.as_ref().map_or(page.rv, |token| token.rv);
        let mut meta = json!({"resourceVersion": rv.to_string()});
        if let Some((key, left)) = page.more {
            meta["continue"] = json!(ContinueToken { rv, key }.encode());
            meta["remainingItemCount"] = json!(left);
        }
        let items: Vec<&Value> = page.items.iter().map(AsRef::as_ref).collect();
        let body = json!({
            "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version(), "metadata": meta, "items": items,
        });
        Ok(ok(200, &body))
    }

    fn watch(&self, resource: &'static Resource) -> Result<Response, ApiError> {
        let selector = self.selector(resource)?;
        let flag = |key: &str| self.query.get(key).is_some_and(|v| v == "true" || v == "1");
        let initial = flag("sendInitialEvents");
        if initial && self.query.get("resourceVersionMatch").map(String::as_str) != Some("NotOlderThan") {
            let cause = "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
                .to_owned();
            let mut error = ApiError::invalid(
                resource,
                "",
                &[("FieldValueForbidden", "resourceVersionMatch".to_owned(), cause)],
            );
            error.message = error.message.replacen(resource.kind, "ListOptions.meta.k8s.io", 1);
            return Err(error);
        }
        let version = self.query.get("resourceVersion").map(String::as_str).unwrap_or_default();
        let rv: u64 = match version {
            "" => 0,
            text => text.parse().map_err(|_| {
                ApiError::bad_request(format!("Invalid value: {text:?}: invalid resourceVersion"))
            })?,
        };
        let seconds = self.query.get("timeoutSeconds").and_then(|s| s.parse().ok()).unwrap_or(1800);
        let mut pending = Vec::new();
        let mut cursor = rv;
        if initial || rv == 0 {
            let page = self.server.store.list(
                resource,
                &self.target.namespace,
                |o| selector.matches(o),
                None,
                usize::MAX,
            );
            pending.extend(page.items.iter().map(|object| line("ADDED", object)));
            cursor = page.rv;
            if initial && flag("allowWatchBookmarks") {
                pending.push(line("BOOKMARK", &bookmark(resource, cursor, true)));
            }
        }
        let watch = Watch {
            changed: self.server.store.subscribe(),
            cut: *self.server.faults.watches.borrow(),
            cuts: self.server.faults.watches.subscribe(),
            server: self.server.clone(),
            resource,
            namespace: self.target.namespace.clone(),
            selector,
            began: cursor,
            cursor,
            pending,
            ended: false,
            until: Instant::now() + Duration::from_secs(seconds),
            bookmarks: flag("allowWatchBookmarks"),
            next_bookmark: Instant::now() + self.server.bookmark_every,
        };
        let stream = futures::stream::unfold(watch, |mut watch| async move {
            let chunk = watch.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(chunk)), watch))
        });
        let response = Response::builder()
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from_stream(stream));
        response.map_err(|e| ApiError::new(500, "InternalError", e.to_string()))
    }
}

/// Creates the default service account and the root certificate, which controllers would create.
pub(crate) fn seed_namespace(store: &Store, name: &str) {
    for (plural, object) in [
        ("serviceaccounts", json!({"metadata": {"name": "default"}})),
        (
            "configmaps",
            json!({"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": crate::tls::placeholder_ca()}}),
        ),
    ] {
        if let Some(resource) = Resource::by_plural(plural) {
            // An object that another client created is kept.
            let _already_there = store.create(resource, name, object);
        }
    }
}

/// Returns the value that a field selector requires; empty without one.
fn selected(query: &Query, field: &str) -> String {
    let terms = query.get("fieldSelector").map(String::as_str).unwrap_or_default().split(',');
    let equal = |term: &str| {
        let rest = term.strip_prefix(field)?.strip_prefix('=')?;
        Some(rest.strip_prefix('=').unwrap_or(rest).to_owned())
    };
    terms.into_iter().find_map(equal).unwrap_or_default()
}

fn delete_options(query: &Query, body: &Value) -> DeleteOptions {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    DeleteOptions {
        grace: body["gracePeriodSeconds"]
            .as_i64()
            .or_else(|| query.get("gracePeriodSeconds").and_then(|g| g.parse().ok())),
        uid: text(&body["preconditions"]["uid"]),
        resource_version: text(&body["preconditions"]["resourceVersion"]),
    }
}
