//! A small client of the service: one request per call, no retries; a failed assertion shows the response.

use std::io::{BufRead, BufReader, Read};

use serde_json::Value;
use ureq::http::{Request, Response};
use ureq::{Agent, Body};

use super::{TIMEOUT, eventually};

/// A response of the service.
#[derive(Debug, Clone)]
pub struct ApiResponse {
    /// The HTTP status.
    pub status: u16,
    /// Headers with lower-case names.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub text: String,
}

impl ApiResponse {
    /// Asserts the status; shows the body on failure.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.text);
        self
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {:?}", self.text))
    }

    /// Returns a header, or an empty string if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value)
    }

    /// Asserts that it is a problem detail (RFC 9457) of this status, and returns it.
    #[track_caller]
    pub fn problem(self, status: u16) -> Value {
        let answer = self.expect(status);
        assert_eq!(answer.header("content-type"), "application/problem+json", "{}", answer.text);
        let problem = answer.json();
        assert_eq!(problem["status"], status);
        assert_eq!(problem["request_id"], answer.header("x-request-id"));
        problem
    }
}

/// A client for one user of a service.
#[derive(Debug, Clone)]
pub struct Api {
    url: String,
    token: Option<String>,
    agent: Agent,
}

impl Api {
    /// A client for `http://host:port` without a token.
    pub fn new(url: &str) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            // An idle connection to a killed server would fail the first request after its restart.
            .max_idle_connections(0)
            .timeout_global(Some(2 * TIMEOUT))
            .build();
        Self { url: url.to_owned(), token: None, agent: agent.into() }
    }

    /// The same client with a token.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// `http://host:port`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The token.
    pub fn secret(&self) -> &str {
        self.token.as_deref().unwrap_or_default()
    }

    /// Sends a request. Paths are relative to the API, except `/metrics`.
    pub fn send_raw(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> Result<Response<Body>, ureq::Error> {
        let base = if path == "/metrics" { "" } else { "/api/v1" };
        let mut request = Request::builder().method(method).uri(format!("{}{base}{path}", self.url));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        match body {
            Some(body) => self.agent.run(request.body(body.to_owned()).unwrap()),
            None => self.agent.run(request.body(()).unwrap()),
        }
    }

    /// Sends a request and reads the response.
    #[track_caller]
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&str>) -> ApiResponse {
        let answered = self.send_raw(method, path, headers, body);
        read(answered.unwrap_or_else(|e| panic!("{method} {path}: {e}"))).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    /// Sends a GET request; `None` if there is no response.
    pub fn try_get(&self, path: &str) -> Option<ApiResponse> {
        read(self.send_raw("GET", path, &[], None).ok()?).ok()
    }

    /// Sends a GET request.
    #[track_caller]
    pub fn get(&self, path: &str) -> ApiResponse {
        self.send("GET", path, &[], None)
    }

    /// Sends a POST request without a body.
    #[track_caller]
    pub fn post(&self, path: &str) -> ApiResponse {
        self.send("POST", path, &[], None)
    }

    /// Submits a job file as JSON. The query is empty or begins with `?`.
    #[track_caller]
    pub fn send_job(&self, query: &str, headers: &[(&str, &str)], job: &Value) -> ApiResponse {
        let headers = [&[("content-type", "application/json")], headers].concat();
        self.send("POST", &format!("/jobs{query}"), &headers, Some(&job.to_string()))
    }

    /// Submits a job that must be accepted; returns its id.
    #[track_caller]
    pub fn submit_with(&self, query: &str, job: &Value) -> String {
        let answer = self.send_job(query, &[], job).expect(201);
        answer.json()["id"].as_str().unwrap().to_owned()
    }

    /// Like [`Api::submit_with`], without a query.
    #[track_caller]
    pub fn submit(&self, job: &Value) -> String {
        self.submit_with("", job)
    }

    /// Reads a job.
    #[track_caller]
    pub fn job(&self, id: &str) -> Value {
        self.get(&format!("/jobs/{id}")).expect(200).json()
    }

    /// Waits until a job satisfies `is`. Panics if it ends before.
    #[track_caller]
    pub fn wait_for(&self, id: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        eventually(&format!("job {id} {what}"), || {
            last = self.job(id);
            let over = ["succeeded", "failed", "cancelled"].contains(&last["state"].as_str().unwrap());
            let found = is(&last);
            assert!(found || !over, "job {id} has ended, but not {what}: {last:#}");
            found.then(|| last.clone())
        })
    }

    /// Waits until a job is in a state. Panics at once if it ends in another state.
    #[track_caller]
    pub fn wait_for_state(&self, id: &str, state: &str) -> Value {
        self.wait_for(id, state, |job| job["state"] == state)
    }

    /// Waits until the events of a job contain at least this many committed splits.
    #[track_caller]
    pub fn wait_for_split(&self, id: &str, splits: usize) {
        eventually(&format!("{splits} splits of job {id}"), || {
            let committed = |e: &&Value| e["type"] == "split_committed";
            (self.events(id).iter().filter(committed).count() >= splits).then_some(())
        });
    }

    /// Reads all events of a job, page by page.
    #[track_caller]
    pub fn events(&self, id: &str) -> Vec<Value> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let page = self.get(&format!("/jobs/{id}/events?after={after}")).expect(200).json();
            all.extend(page["events"].as_array().unwrap().iter().cloned());
            match page["next_after"].as_i64() {
                Some(next) => after = next,
                None => return all,
            }
        }
    }

    /// The states of a job in order, including the first one.
    #[track_caller]
    pub fn states(&self, id: &str) -> Vec<String> {
        let events = self.events(id).into_iter().filter(|e| e["type"] == "state");
        events.map(|e| e["data"]["to"].as_str().unwrap().to_owned()).collect()
    }

    /// Opens a stream of events.
    #[track_caller]
    pub fn stream(&self, path: &str, headers: &[(&str, &str)]) -> EventStream {
        let headers = [&[("accept", "text/event-stream")], headers].concat();
        let answer = self.send_raw("GET", path, &headers, None).unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        EventStream { lines: BufReader::new(Box::new(answer.into_body().into_reader())) }
    }
}

fn read(mut answer: Response<Body>) -> Result<ApiResponse, ureq::Error> {
    let text = answer.body_mut().with_config().limit(64 << 20).read_to_string()?;
    let headers = answer.headers().iter();
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
    Ok(ApiResponse { status: answer.status().as_u16(), headers, text })
}

/// Server-sent events, until the server closes the stream.
pub struct EventStream {
    lines: BufReader<Box<dyn Read + Send>>,
}

/// A server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct SseEvent {
    /// Its id, if it has one.
    pub id: Option<i64>,
    /// Its type.
    pub kind: String,
    /// Its data.
    pub data: Value,
}

impl Iterator for EventStream {
    type Item = SseEvent;

    fn next(&mut self) -> Option<SseEvent> {
        let (mut id, mut kind, mut data) = (None, String::new(), String::new());
        loop {
            let mut line = String::new();
            // A killed server ends its streams too.
            if self.lines.read_line(&mut line).is_err() || line.is_empty() {
                return None;
            }
            let line = line.trim_end_matches(['\r', '\n']);
            match line.split_once(':') {
                Some(("id", value)) => id = Some(value.trim().parse().unwrap()),
                Some(("event", value)) => kind = value.trim().to_owned(),
                Some(("data", value)) => data += value,
                None if line.is_empty() && !kind.is_empty() => {
                    return Some(SseEvent { id, kind, data: serde_json::from_str(&data).unwrap() });
                }
                // An id without an event: the position from which a stream lost before its first event continues.
                None if line.is_empty() => id = None,
                // a comment that keeps the connection alive
                _ => {}
            }
        }
    }
}
