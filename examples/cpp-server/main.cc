// SPDX-License-Identifier: Apache-2.0
// Serves a model over HTTP with the C++ library: token ids in, token ids out.
//   paceline-cpp-server FOLDER [--host 127.0.0.1] [--port 8000] [--device cpu|cuda]
//                       [--max-num-seqs 64] [--max-queue 256] [--drain-timeout 60]
// FOLDER was written by `paceline convert`. docs/embedding.md describes the routes.
#include <pthread.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include <httplib.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/log.h>
#include <paceline/model.h>

#include "completions.h"
#include "dispatcher.h"

namespace {

constexpr size_t kMaxBodyBytes = size_t{8} << 20;
// How late a client that has gone away is noticed while its request emits nothing.
constexpr std::chrono::milliseconds kLookAfterClient(50);

struct Arguments {
  std::string folder;
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free port
  paceline::Device device = paceline::Device::kCpu;
  int32_t max_num_seqs = 64;
  int32_t max_queue = 256;
  std::chrono::seconds drain_timeout{60};
};

int32_t parse_integer(std::string_view name, std::string_view text, int32_t high) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > high) {
    throw std::invalid_argument(std::string(name) + " is " + std::string(text) +
                                "; allowed: an integer from 0 to " + std::to_string(high));
  }
  return value;
}

Arguments parse_arguments(int argc, char** argv) {
  Arguments given;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (!name.starts_with("--")) {
      if (!given.folder.empty()) throw std::invalid_argument("FOLDER is given twice");
      given.folder = name;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(std::string(name) + " has no value");
    const std::string_view value = argv[i];
    if (name == "--host") {
      given.host = value;
    } else if (name == "--port") {
      given.port = parse_integer(name, value, 65535);
    } else if (name == "--max-num-seqs") {
      given.max_num_seqs = parse_integer(name, value, 1024);
    } else if (name == "--max-queue") {
      given.max_queue = parse_integer(name, value, 10000);
    } else if (name == "--drain-timeout") {
      given.drain_timeout = std::chrono::seconds(parse_integer(name, value, 86400));
    } else if (name == "--device" && (value == "cpu" || value == "cuda")) {
      given.device = value == "cpu" ? paceline::Device::kCpu : paceline::Device::kCuda;
    } else {
      throw std::invalid_argument(std::string(name) + " " + std::string(value) +
                                  " is unknown; allowed: --host, --port, --device cpu or cuda, "
                                  "--max-num-seqs, --max-queue, --drain-timeout");
    }
  }
  if (given.folder.empty()) throw std::invalid_argument("FOLDER is missing");
  return given;
}

void answer(httplib::Response& response, int status, const nlohmann::json& body) {
  response.status = status;
  response.set_content(to_text(body), "application/json");
}

// A completion and the connection that waits for it. It ends with the response, which cancels what
// still runs.
struct Exchange {
  std::shared_ptr<Dispatcher::Running> running;
  CompletionWriter writer;
  bool is_streamed;

  // Sends what comes next, or waits for it for a while. False: the client has gone away.
  bool send_next(httplib::DataSink& sink) {
    try {
      const auto event = running->next(kLookAfterClient);
      // A first write to a connection that its client has closed would succeed.
      if (!sink.is_writable()) return false;
      if (event) {
        const nlohmann::json piece = writer.add(*event);
        if (is_streamed && !send_event(sink, to_text(piece))) return false;
      }
      if (!running->has_ended()) return true;
      if (is_streamed) {
        if (!send_event(sink, to_text(writer.end())) || !send_event(sink, "[DONE]")) return false;
      } else if (!send(sink, to_text(writer.whole()))) {
        return false;
      }
    } catch (const Unavailable& error) {
      // The status has been sent.
      const std::string body = to_text(error_json(error.what(), "server_error"));
      if (!(is_streamed ? send_event(sink, body) : send(sink, body))) return false;
    }
    sink.done();
    return true;
  }

  static bool send_event(httplib::DataSink& sink, const std::string& data) {
    return send(sink, "data: " + data + "\n\n");
  }
  static bool send(httplib::DataSink& sink, const std::string& data) {
    return sink.write(data.data(), data.size());
  }
};

void complete(Dispatcher& dispatcher, const paceline::SamplingOptions& defaults,
              const httplib::Request& http, httplib::Response& response) {
  static std::atomic<int64_t> num_requests = 0;
  // A web page of another host can send other types without asking the browser's user.
  if (!http.get_header_value("Content-Type").starts_with("application/json")) {
    return answer(response, 415,
                  error_json("the content type must be application/json", "invalid_request_error"));
  }
  CompletionCall call = parse_call(http.body, defaults);
  const auto num_prompt_tokens = static_cast<int64_t>(call.request.prompt.size());
  const int32_t num_samples = call.request.num_samples;
  std::shared_ptr<Dispatcher::Running> running = dispatcher.start(std::move(call.request));
  if (running == nullptr) {
    response.set_header("Retry-After", "1");
    return answer(response, 429,
                  error_json("the queue is full; try again later, or start the server with a "
                             "larger --max-queue",
                             "rate_limit_error"));
  }
  CompletionWriter writer("cmpl-" + std::to_string(++num_requests), num_prompt_tokens, num_samples);
  // Both kinds are sent piece by piece: only what sends can notice that the client has gone away.
  const auto exchange =
      std::make_shared<Exchange>(Exchange{std::move(running), std::move(writer), call.is_streamed});
  response.set_chunked_content_provider(
      call.is_streamed ? "text/event-stream" : "application/json",
      [exchange](size_t, httplib::DataSink& sink) { return exchange->send_next(sink); });
}

void answer_error(httplib::Response& response, const std::exception_ptr& thrown) try {
  std::rethrow_exception(thrown);
} catch (const Refusal& error) {
  answer(response, 400, error_json(error.what(), "invalid_request_error", error.param));
} catch (const paceline::InvalidArgument& error) {
  answer(response, 400, error_json(error.what(), "invalid_request_error"));
} catch (const paceline::Unsupported& error) {
  answer(response, 400, error_json(error.what(), "invalid_request_error"));
} catch (const Unavailable& error) {
  answer(response, 503, error_json(error.what(), "server_error"));
} catch (const std::exception& error) {
  answer(response, 500, error_json(error.what(), "server_error"));
}

// The load and the counters of the engine, for Prometheus.
std::string metrics(const paceline::ExecutorStats& stats) {
  std::ostringstream text;
  const auto add = [&](const char* name, const char* type, int64_t value) {
    text << "# TYPE paceline_" << name << ' ' << type << "\npaceline_" << name << ' ' << value
         << '\n';
  };
  add("num_requests_running", "gauge", stats.num_running);
  add("num_requests_waiting", "gauge", stats.num_waiting);
  add("generation_tokens_total", "counter", stats.num_emitted_tokens);
  add("requests_cancelled_total", "counter", stats.num_cancelled);
  add("spec_decode_num_draft_tokens_total", "counter", stats.num_draft_tokens);
  add("spec_decode_num_accepted_tokens_total", "counter", stats.num_accepted_tokens);
  int64_t held_blocks = 0;
  for (const auto& group : stats.kv_groups) held_blocks += group.held_blocks;
  add("kv_blocks_held", "gauge", held_blocks);
  return text.str();
}

void add_routes(httplib::Server& server, Dispatcher& dispatcher, paceline::Executor& executor,
                const paceline::SamplingOptions& defaults) {
  server.Get("/health", [&](const httplib::Request&, httplib::Response&) {
    dispatcher.check_running();  // 503 otherwise
  });
  server.Get("/metrics", [&](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics(executor.stats()), "text/plain; version=0.0.4");
  });
  server.Post("/v1/completions", [&](const httplib::Request& http, httplib::Response& response) {
    complete(dispatcher, defaults, http, response);
  });
  server.set_exception_handler([](const httplib::Request&, httplib::Response& response,
                                  std::exception_ptr thrown) { answer_error(response, thrown); });
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (!response.body.empty()) return;
    answer(response, response.status,
           error_json("status " + std::to_string(response.status), "invalid_request_error"));
  });
}

int serve(const Arguments& given) {
  const paceline::ModelFolder folder = paceline::load_model_folder(given.folder, given.device);
  // The engine chooses all else.
  paceline::Executor executor(
      folder.target, folder.draft,
      {.max_num_seqs = given.max_num_seqs, .max_waiting_requests = given.max_queue});
  Dispatcher dispatcher(executor);

  httplib::Server server;
  server.set_payload_max_length(kMaxBodyBytes);
  server.set_tcp_nodelay(true);
  // A connection keeps a thread, most of which sleep. Those beyond them wait.
  const auto num_threads = static_cast<size_t>(given.max_num_seqs + given.max_queue + 16);
  server.new_task_queue = [=] { return new httplib::ThreadPool(num_threads); };
  const paceline::SamplingOptions defaults = paceline::recommended_sampling(folder);
  add_routes(server, dispatcher, executor, defaults);
  const int port = given.port == 0 ? server.bind_to_any_port(given.host)
                   : server.bind_to_port(given.host, given.port) ? given.port
                                                                 : -1;
  if (port < 0) {
    std::cerr << "error: " << given.host << ':' << given.port
              << " cannot be used; choose another --host or --port\n";
    return 1;
  }
  std::cout << "serving at http://" << given.host << ':' << port << std::endl;

  // SIGTERM and SIGINT are blocked in all threads, and this one waits for them.
  std::thread stopper([&] {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    int number = 0;
    sigwait(&signals, &number);
    if (!dispatcher.drain(given.drain_timeout)) std::clog << "requests are cut off\n";
    server.stop();
  });
  const bool has_served = server.listen_after_bind();
  if (!has_served) pthread_kill(stopper.native_handle(), SIGTERM);
  stopper.join();
  return has_served ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  paceline::set_log_sink(
      [](paceline::LogLevel, std::string_view line) { std::clog << line << '\n'; });
  return serve(parse_arguments(argc, argv));
} catch (const std::invalid_argument& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
