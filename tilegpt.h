/* All of libtilegpt: the model and its training, data, layers, attention, devices. */
#ifndef TILEGPT_H
#define TILEGPT_H

#include "attention/attention.h"
#include "data/corpus.h"
#include "data/dataset.h"
#include "data/loader.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"
#include "data/tokenizer_train.h"
#include "gpt/checkpoint.h"
#include "gpt/evaluate.h"
#include "gpt/gpt.h"
#include "gpt/sample.h"
#include "gpt/schedule.h"
#include "layers/layers.h"
#include "runtime/comm.h"
#include "runtime/error.h"
#include "runtime/log.h"

#endif
